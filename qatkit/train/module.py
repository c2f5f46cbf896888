"""The LightningModule that takes a float model to INT8, in hooks that can also be used separately.

    module = QATModule(model, example)       fuse → stub → prepare_qat
    module.adjust(batches)                   algorithms that look at activations first, if any
    module.calibrate(batches)                ranges from real data
    module.correct(batches)                  algorithms that follow calibration, if any
    trainer.fit(module, loader)              fine-tuning with fake quantization
    converted = module.convert().graph       int8 weights, explicit quantize and dequantize

A subclass may override any hook; `pipeline.train(config, module_type=...)` runs the whole chain with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from torch import Tensor, fx, nn

from qatkit.algorithms import Algorithm, dead_channels
from qatkit.algorithms.base import CALIBRATED, FUSED, OBSERVED, PREPARED
from qatkit.algorithms.shifted_means import ShiftedMean, shifted_means
from qatkit.calibration import calibrate
from qatkit.calibration.losses import MixedScale
from qatkit.calibration.mixed_scales import Sample, mixed_scales
from qatkit.config.float_overrides import float_overrides
from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.captured import Captured
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.fuse import fuse
from qatkit.graph.learning import follow_oscillation
from qatkit.graph.nodes import site
from qatkit.graph.pass_result import PassResult
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import BY_OVERRIDE, prepare_qat, ready_to_place
from qatkit.graph.proof import prove
from qatkit.graph.quantizers import fake_quantizers, quantized_operators
from qatkit.graph.scales.align import align
from qatkit.graph.sharing import own_unlike
from qatkit.graph.signature import (
    Example,
    batch_multiple,
    flatten,
    graph_axes,
    in_float32,
    resized,
    unflatten,
)
from qatkit.graph.single_precision import in_single_precision
from qatkit.graph.stub import stub
from qatkit.graph.trace import is_traced
from qatkit.graph.transplant import transplant
from qatkit.quant.backends import FBGEMM, Backend
from qatkit.quant.spec import WEIGHT_ONLY
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.records.results import MIXED_SCALES
from qatkit.records.tried import Ran
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.train.distillation import find_features, with_drawn_norms
from qatkit.train.fine_tuning import FineTuning
from qatkit_verify.errors import ConfigError

NOTHING, RAN = "finds nothing to change", "ran"


class QATModule(FineTuning):
    """A Lightning module that prepares, calibrates, fine-tunes and converts a float model.

    Args:
        model: the float model, which is not changed, or a `Captured` of it with the same example. A `Captured` is
            traced and compared with its graph only once for all modules that are made from it. A model of another
            type than float32 is quantized from a float32 copy, and its inputs are converted too.
        example: an input of the real shapes: images [N, C, H, W], a tuple of positional arguments or a
            mapping of keyword arguments, with tensors anywhere in them (`qatkit.graph.signature`).
        schedule: settings of fine-tuning, such as the BatchNorm mode and the milestones.
        backend: the backend, which defines what is quantized and how.
        overrides: overrides by pattern (`qatkit.graph.overrides`).
        quantizers: factories of the quantizers of activations and weights, and of the observers.
        algorithms: post-training algorithms, which need no labels; they run in the order of their stages, then in
            this order.
        quantize: whether to quantize; False makes the control, which has the same graph and schedule in
            float.
        task: the task, which defines the loss and the metric of epochs.

    Attributes:
        graph: the prepared GraphModule, called with the example's tensors as positional arguments.
        example: a batch of one sample with the same structure; if the model supports only some batch sizes, the
            smallest of them.
        skipped: (site, reason) of everything left float, over all hooks.
        notes: (site, reason) of everything that the algorithms left unchanged, and of dead channels.
        ran: the algorithms that have run while the graph was made; those with images are in `about[RAN]`.
        mixed_scales: "float" or "report", the response of `calibrate` to tensors that one scale cannot represent.
        mixed: the tensors of this kind that `calibrate` found.
        floats: the sites of the operators that `calibrate` left float because of these tensors.
        progress: whether progress bars are shown.
        mean_shifts: "correct" or "report", the response of `calibrate` to outputs shifted by rounded weights.
        shifted: the operators whose outputs `calibrate` found to be shifted.

    Raises:
        ConfigError: the model cannot be traced or quantized, or an override matches nothing.
    """

    mixed_scales = "float"
    mean_shifts = "correct"
    progress = False

    def __init__(  # noqa: PLR0913  parts of one recipe, most of them with a default
        self,
        model: nn.Module | Captured,
        example: Example,
        schedule: ScheduleConfig | None = None,
        backend: Backend = FBGEMM,
        overrides: Mapping[str, OverrideConfig] | None = None,
        quantizers: Quantizers = Quantizers(),  # noqa: B008  frozen, without state
        *,
        algorithms: Sequence[Algorithm] = (),
        quantize: bool = True,
        task: Task = CLASSIFICATION,
    ) -> None:
        schedule = schedule or ScheduleConfig()
        captured = self._captured(model)
        original = model.model if isinstance(model, Captured) else model
        model, given = in_single_precision(original)
        example = in_float32(example)
        super().__init__(schedule, example, quantize=quantize)
        self._original = (original,)
        self.learn(task)
        self.backend, self.overrides = backend, dict(overrides or {})
        self.quantizers, self.algorithms = quantizers, tuple(algorithms)
        types = (str(dtype).removeprefix("torch.") for dtype in given)
        self._about_model = [
            ("model", f"has {one} values and is quantized from a float32 copy") for one in types
        ]
        # In a tuple, so that it is not a submodule. An already traced graph is changed in place and can be
        # prepared only once.
        self._made_of: tuple[nn.Module | Captured, ...] = (
            () if is_traced(model) else (model if captured is None else captured,)
        )
        self.mixed: list[MixedScale] = []
        self.floats: list[str] = []
        self.shifted: list[ShiftedMean] = []
        self.graph = self._prepared(model if captured is None else captured, example)
        if self._distills and not (schedule.distill_teacher or schedule.distill_checkpoint):
            self.learn_from(model)

    def _prepared(self, model: nn.Module | Captured, example: Example | None = None) -> fx.GraphModule:
        """Returns the prepared graph of a float model, and sets `skipped`, `notes` and `ran`.

        Args:
            model: the float model in single precision.
            example: the input for the proof of equivalence; None: the proof is not repeated.
        """
        captured = model if isinstance(model, Captured) else None
        given = model if captured is None else captured.graph(share=self._shares_weights())
        fused = self.fuse(cast(nn.Module, given))
        if example is not None:
            self.example = _of_one(fused.graph, example)
        stubbed = self.stub(fused.graph)
        if captured is not None:
            captured.prove(stubbed.graph)
        elif example is not None:
            prove(cast(nn.Module, model), stubbed.graph, example)
        changed = self.run_algorithms(self.of_stage(FUSED), stubbed.graph, self.example)
        prepared = self.prepare_qat(changed.graph)
        corrected = self.run_algorithms(self.of_stage(PREPARED), prepared.graph, self.example)
        self.skipped = fused.skipped + stubbed.skipped + prepared.skipped
        self.notes = dead_channels(corrected.graph) + changed.skipped + corrected.skipped
        self.ran = changed.ran + corrected.ran
        self.notes += corrected.graph.meta.get("notes", [])
        self.notes += self._about_model
        self.notes += [note for one in self.algorithms for note in one.notes(corrected.graph)]
        graph: fx.GraphModule = corrected.graph.train()
        if self.quantize and self.schedule.oscillation != "ignore":
            follow_oscillation(graph)
        return graph

    def opened(self, model: nn.Module | Captured) -> fx.GraphModule:
        """Returns a graph as `prepare_qat` gets it, made again from the float model, to decide what is quantized."""
        captured = self._captured(model)
        model = model.model if isinstance(model, Captured) else model
        shares = self._shares_weights()
        fused = self.fuse(in_single_precision(model)[0] if captured is None else captured.graph(share=shares))
        graph: fx.GraphModule = self.run_algorithms(
            self.of_stage(FUSED), self.stub(fused.graph).graph, self.example
        ).graph
        ready_to_place(graph, self.example)
        return graph

    def fuse(self, model: nn.Module) -> PassResult:
        """Fuses BatchNorms with their operators, in a traced copy or in an already traced graph (hook)."""
        schedule = self.schedule
        # Without training, branches are merged into plain weights, which the algorithms may change.
        branches = schedule.branches if schedule.epochs else "merged"
        # If only weights are quantized, the scales of depthwise weights would take more space than a
        # BatchNorm.
        depthwise = not self.backend.weights_alone
        return fuse(model, self.example, schedule.batch_norm, depthwise=depthwise, branches=branches)

    def _shares_weights(self) -> bool:
        """Returns whether nothing changes the weights, so that they can be shared with the float model.

        A second copy would take half of the memory for a large model. The result is False for a subclass, whose
        hooks may change weights.
        """
        writes = bool(self.schedule.epochs) or any(one.changes_weights for one in self.algorithms)
        return type(self) is QATModule and not writes

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads parameters and buffers; a weight shared with the float model is copied first if its values change."""
        if self._shares_weights():
            own_unlike(self, state_dict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _captured(self, model: nn.Module | Captured) -> Captured | None:
        """Returns the capture whose graph is passed to `fuse`; None for a plain model or with an overridden `fuse`."""
        return model if isinstance(model, Captured) and type(self).fuse is QATModule.fuse else None

    def stub(self, model: nn.Module) -> PassResult:
        """Splits attention and gated activations into operators that can be quantized (hook)."""
        in_int8 = [pattern for pattern, override in self.overrides.items() if override.int8]
        return stub(model, self.example, in_int8)

    def run_algorithms(self, algorithms: Iterable[Algorithm], graph: Any, inputs: Any) -> PassResult:
        """Runs `algorithms`, all of one stage, one after the other on a graph of that stage (hook).

        Raises:
            ConfigError: an algorithm does not return a PassResult.
        """
        result = PassResult(graph)
        for algorithm in algorithms:
            name, start = type(algorithm).__name__, time.monotonic()
            done = algorithm(result.graph, inputs)
            if not isinstance(done, PassResult):
                raise ConfigError("algorithm", name, "a callable that returns a PassResult")
            ran = Ran(name, algorithm.stage, done.changed, round(time.monotonic() - start, 2))
            idle = [] if done.changed else [(name, NOTHING)]
            result = PassResult(
                done.graph,
                result.changed + done.changed,
                result.skipped + done.skipped + idle,
                [*result.ran, ran],
            )
        return result

    def of_stage(self, stage: str) -> list[Algorithm]:
        """Returns the module's algorithms of a stage (`qatkit.algorithms.base`), in their order."""
        return [algorithm for algorithm in self.algorithms if algorithm.stage == stage]

    def prepare_qat(self, graph: Any) -> PassResult:
        """Inserts a FakeQuantize for each quantized activation and weight (hook)."""
        return prepare_qat(graph, self.backend, self.example, self.overrides, self.quantizers)

    def convert(self) -> PassResult:
        """Returns the converted copy, on the CPU (hook)."""
        return convert(self.graph)

    @property
    def left_float(self) -> list[str]:
        """The sites that are float in the file for a known reason.

        The reasons are an override, mixed scales, an operator of which only the weights are quantized, and a Linear
        with a float bias and a float result, which has no int8 kernel. The audit checks all other skipped operators.
        """
        found = [
            where
            for where, reason in self.skipped
            if reason.startswith((BY_OVERRIDE, WEIGHT_ONLY, MIXED_SCALES))
        ]
        if self.backend.for_onnxruntime and not self.backend.weights_alone:
            found += [
                site(node)
                for node, operator, fake in quantized_operators(self.graph)
                if isinstance(operator, nn.Linear) and fake.spec.bias_dtype == "float"
            ]
        return found

    def adjust(self, batches: Iterable[Any], algorithms: Iterable[Algorithm] | None = None) -> None:
        """Runs the algorithms of the stage "observed" (or those given) on `batches`, before `calibrate` (hook)."""
        self._with_images(self.of_stage(OBSERVED) if algorithms is None else list(algorithms), batches)

    def calibrate(self, batches: Iterable[Any]) -> int:
        """Finds the ranges from `batches` with the example's structure, and returns the number of images.

        The first images are searched for tensors that one scale cannot represent. The operators that produce them
        are left float (`qatkit.calibration.mixed_scales`), in a new `graph`, unless `mixed_scales` is "report", the
        backend needs all operators in int8, no quantized weight would remain, or the model was already traced.
        Shifts of means by rounded weights (`qatkit.algorithms.shifted_means`) are corrected in the biases, unless
        `mean_shifts` is "report". Neither is done for number formats or without quantization.
        """
        sample = Sample(self.graph)
        images = calibrate(self.graph, sample.of(map(self.tensors, batches)))
        if self.quantize and not self.backend.simulated:  # both checks only apply to evenly spaced steps
            if fake_quantizers(self.graph):
                self._find_mixed_scales(sample)
            correct = self.mean_shifts == "correct"
            self.shifted = shifted_means(self.graph, sample, correct=correct)
        return images

    def _find_mixed_scales(self, sample: Sample) -> None:
        """Finds mixed scales, and searches again after each change, since other tensors are quantized then."""
        self.mixed, known = [], set[str]()
        while found := [
            one for one in mixed_scales(self.graph, sample, self.progress) if one.tensor not in known
        ]:
            known |= {one.tensor for one in found}
            self.mixed += found
            floats = tuple(dict.fromkeys(name for one in found for name in one.floats))
            weighted = {site(node) for node, _, _ in quantized_operators(self.graph)}
            stays = self.mixed_scales != "float" or self.backend.all_int8
            if stays or not self._made_of or not floats or weighted <= set(floats):
                return
            self.leave_float(floats, sample)

    def leave_float(self, sites: Sequence[str], batches: Iterable[Any] = ()) -> None:
        """Leaves further operators float, in a new `graph` that keeps the state of everything else.

        Args:
            sites: sites of the operators.
            batches: batches to calibrate tensors that were not quantized before.

        Raises:
            ConfigError: nothing is left to quantize, or the model was already traced.
        """
        if not self._made_of:
            reason = "the graph was already traced, so it can be prepared only once; pass the untraced model"
            raise ConfigError("model", type(self.original).__name__, reason=reason)
        before, device = self.graph, next((p.device for p in self.graph.parameters()), None)
        self.overrides |= float_overrides(sites)
        self.floats += sites
        graph = self._prepared(self._made_of[0]).to(device)
        new, given = transplant(before, graph), list(batches)
        if new and given:
            calibrate(graph, given)
            transplant(before, graph)
        align(graph)
        set_phase(graph, observe=False, quantize=True)
        self.graph = graph.train(before.training)
        self._tapped = ()
        lost = {name: one for one in self.mixed for name in one.floats}
        self.skipped = [
            (
                where,
                f"{MIXED_SCALES} {lost[where]}"
                if where in lost and reason.startswith(BY_OVERRIDE)
                else reason,
            )
            for where, reason in self.skipped
        ]

    def correct(self, batches: Iterable[Any], algorithms: Iterable[Algorithm] | None = None) -> None:
        """Runs the algorithms of the stage "calibrated" (or those given) on `batches`, after `calibrate` (hook)."""
        self._with_images(self.of_stage(CALIBRATED) if algorithms is None else list(algorithms), batches)

    def _with_images(self, chosen: list[Algorithm], batches: Iterable[Any]) -> None:
        given = batches if isinstance(self.example, Tensor) else map(self.tensors, batches)
        seen = given if len(chosen) < 2 else list(given)  # a generator can be read by only one algorithm
        done = self.run_algorithms(chosen, self.graph, seen)
        # Stored in the checkpoint, since a resumed run does not call the algorithms again.
        self.about[RAN] = [*self.about.get(RAN, ()), *map(asdict, done.ran)]

    def learn_from(self, model: nn.Module, teacher: nn.Module | None = None) -> None:
        """Sets the teacher, and finds `schedule.distill_features` in the model and the teacher.

        Args:
            model: the float model of this module.
            teacher: the teacher; None: the model itself.

        Raises:
            ConfigError: model or teacher lacks a feature, the shapes of a feature differ, or an algorithm rescales the
                compared channels.
        """
        pairs = self.schedule.distill_features
        model = in_single_precision(model)[0].cpu().eval()
        other = model if teacher is None else in_single_precision(teacher)[0].cpu().eval()
        self.teacher, self._tapped = (other,), ()
        if pairs and self.of_stage(OBSERVED):
            names = " and ".join(type(one).__name__ for one in self.of_stage(OBSERVED))
            allowed = f"[] with {names}, because the compared channels may be rescaled"
            raise ConfigError("schedule.distill_features", list(pairs), allowed)
        if pairs:
            probe = with_drawn_norms(model)
            fused = self.run_algorithms(
                self.of_stage(FUSED), self.stub(self.fuse(probe).graph).graph, self.example
            )
            graph, tensors = self.prepare_qat(fused.graph).graph, self.tensors(self.example)
            self.features = find_features(graph, tensors, probe, other, pairs, self.example)


def _of_one(graph: fx.GraphModule, example: Example) -> Example:
    """Returns a copy of `example` with one sample, or the smallest number of samples that the graph supports."""
    tensors = flatten(example)
    return unflatten(
        example, [t.clone() for t in resized(tensors, batch_multiple(graph), graph_axes(graph, tensors))]
    )
