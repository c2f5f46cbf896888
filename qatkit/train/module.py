"""The LightningModule: a float model on its way to INT8, in hooks that each can be used alone.

    module = QATModule(model, example)       fuse → stub → prepare_qat
    module.adjust(batches)                   the algorithms that look at activations first, if there are any
    module.calibrate(batches)                ranges from real data
    module.correct(batches)                  the algorithms that come after calibration, if there are any
    trainer.fit(module, loader)              fine-tuning with fake quantization
    converted = module.convert().graph       int8 weights, explicit quantize and dequantize

A subclass may override any hook; `pipeline.train(config, module_type=...)` runs the whole chain with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, fx, nn

from qatkit.algorithms import Algorithm, dead_channels
from qatkit.algorithms.base import CALIBRATED, FUSED, OBSERVED, PREPARED
from qatkit.algorithms.shifted_means import ShiftedMean, shifted_means
from qatkit.calibration import calibrate
from qatkit.calibration.mixed_scales import MixedScale, Sample, mixed_scales
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
from qatkit.tasks import CLASSIFICATION, Task
from qatkit.train.distillation import find_features, with_drawn_norms
from qatkit.train.fine_tuning import FineTuning
from qatkit_verify.errors import ConfigError

NOTHING, IDLE = "finds nothing to change", "idle"
MIXED = "float, since one scale for all values loses"  # begins the reasons of what `calibrate` left float


class QATModule(FineTuning):
    """A prepared model.

    Args:
        model: the float model; left untouched. Captured with the same example, it is traced and proven once for all
            modules that are made of it. One in another type than float32 is quantized from a float32 copy,
            and so are its inputs.
        example: what the model is called with, of the real shapes: images [N, C, H, W], a tuple of positional or a
            mapping of keyword arguments, with tensors anywhere in them (`qatkit.graph.signature`).
        schedule: fine-tuning; BatchNorm mode and milestones.
        backend: what is quantized and how.
        overrides: by pattern (`qatkit.graph.overrides`).
        quantizers: make the quantizers of activations and weights, and the observers.
        algorithms: corrections without labels, each at its stage, in this order.
        quantize: False makes the control: the same graph and schedule in float.
        task: what is learned: the loss, and the metric of epochs.

    Attributes:
        graph: the prepared GraphModule, called with the example's tensors one after the other.
        example: a batch of one, in the same form; of a model that takes one size of batch alone, that size.
        skipped: (site, reason) of what was left float, over all hooks.
        notes: (site, reason) of what the corrections left as it was, and of dead channels.
        mixed_scales: "float" or "report", what `calibrate` does about tensors that one scale does not hold.
        mixed: those that it has found.
        floats: sites of the operators that it has left float for them.
        progress: whether bars are shown.
        mean_shifts: "correct" or "report", what `calibrate` does about outputs that rounded weights shift.
        shifted: the operators of which it has found that.

    Raises:
        ConfigError: a model that can't be traced or quantized, or an override that matches nothing.
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
        self._about_model = [("model", f"is {one}: it is quantized from float32") for one in types]
        # In a tuple: no submodule. A graph of ours is changed in place and can be prepared only once.
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
        """Returns the prepared graph of a float model, and notes what was left out.

        Args:
            model: in single precision.
            example: what it is proven with; None: not again.
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
        self.notes += corrected.graph.meta.get("notes", [])
        self.notes += self._about_model
        self.notes += [note for one in self.algorithms for note in one.notes(corrected.graph)]
        graph: fx.GraphModule = corrected.graph.train()
        if self.quantize and self.schedule.oscillation != "ignore":
            follow_oscillation(graph)
        return graph

    def opened(self, model: nn.Module | Captured) -> fx.GraphModule:
        """The graph that `prepare_qat` was given, made of the float model again: what placement can be asked of."""
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
        """Hook: BatchNorms into their operators (a traced copy of `model`; a graph of ours is changed in place)."""
        schedule = self.schedule
        # Without training, merged weights are plain ones, which the algorithms may change.
        branches = schedule.branches if schedule.epochs else "merged"
        depthwise = (
            not self.backend.weights_alone
        )  # whose scales would take more than a BatchNorm's float weights
        return fuse(model, self.example, schedule.batch_norm, depthwise=depthwise, branches=branches)

    def _shares_weights(self) -> bool:
        """Whether nothing will write into weights, so that they can be the float model's: a second copy is half of the
        memory of a large model.
        """
        writes = bool(self.schedule.epochs) or any(one.changes_weights for one in self.algorithms)
        return type(self) is QATModule and not writes

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads parameters and buffers; the float model keeps its weights where they are others."""
        if self._shares_weights():
            own_unlike(self, state_dict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _captured(self, model: nn.Module | Captured) -> Captured | None:
        """Where `fuse` gets a graph from; a hook of one's own is given the model itself."""
        return model if isinstance(model, Captured) and type(self).fuse is QATModule.fuse else None

    def stub(self, model: nn.Module) -> PassResult:
        """Hook: opens attention and gated activations."""
        in_int8 = [pattern for pattern, override in self.overrides.items() if override.int8]
        return stub(model, self.example, in_int8)

    def run_algorithms(self, algorithms: Iterable[Algorithm], graph: Any, inputs: Any) -> PassResult:
        """Hook: `algorithms`, all of one stage, one after the other, on a graph of that stage."""
        result = PassResult(graph)
        for algorithm in algorithms:
            done = algorithm(result.graph, inputs)
            if not isinstance(done, PassResult):
                raise ConfigError(
                    "algorithm", type(algorithm).__name__, "a callable that returns a PassResult"
                )
            idle = [] if done.changed else [(type(algorithm).__name__, NOTHING)]
            result = PassResult(
                done.graph, result.changed + done.changed, result.skipped + done.skipped + idle
            )
        return result

    def of_stage(self, stage: str) -> list[Algorithm]:
        """The module's algorithms of a stage (`qatkit.algorithms.base`), in their order."""
        return [algorithm for algorithm in self.algorithms if algorithm.stage == stage]

    def prepare_qat(self, graph: Any) -> PassResult:
        """Hook: FakeQuantize on edges and weights."""
        return prepare_qat(graph, self.backend, self.example, self.overrides, self.quantizers)

    def convert(self) -> PassResult:
        """Hook: the converted copy, on the CPU."""
        return convert(self.graph)

    @property
    def left_float(self) -> list[str]:
        """Sites that are float in the file with good reason: an override says so, or nobody has an int8 kernel.

        Of a Linear with a float bias there is none where its result is float. What else was skipped is for the audit.
        """
        found = [
            where for where, reason in self.skipped if reason.startswith((BY_OVERRIDE, WEIGHT_ONLY, MIXED))
        ]
        if self.backend.for_onnxruntime and not self.backend.weights_alone:
            found += [
                site(node)
                for node, operator, fake in quantized_operators(self.graph)
                if isinstance(operator, nn.Linear) and fake.spec.bias_dtype == "float"
            ]
        return found

    def adjust(self, batches: Iterable[Any], algorithms: Iterable[Algorithm] | None = None) -> None:
        """Hook: before `calibrate`, the algorithms of the stage "observed" (or those given), each on `batches`."""
        self._with_images(self.of_stage(OBSERVED) if algorithms is None else list(algorithms), batches)

    def calibrate(self, batches: Iterable[Any]) -> int:
        """Finds the ranges from `batches` of the example's form; returns how many images there were.

        Tensors that one scale does not hold are looked for on the first images; the operators that make them are left
        float then (`qatkit.calibration.mixed_scales`), in another `graph`, unless `mixed_scales` is "report". Shifts of
        means by rounded weights (`qatkit.algorithms.shifted_means`) go into the biases, unless `mean_shifts` is.
        """
        sample = Sample(self.graph)
        images = calibrate(self.graph, sample.of(map(self.tensors, batches)))
        if self.quantize and not self.backend.simulated:  # both are about steps of one size
            if fake_quantizers(self.graph):
                self._find_mixed_scales(sample)
            correct = self.mean_shifts == "correct"
            self.shifted = shifted_means(self.graph, sample, correct=correct)
        return images

    def _find_mixed_scales(self, sample: Sample) -> None:
        """Looks again behind each change: other tensors are quantized then."""
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
        """Leaves further operators float, in another `graph`; everything else stays as it has become.

        Args:
            sites: of the operators.
            batches: from which tensors get their ranges that were not quantized before.

        Raises:
            ConfigError: nothing is left to quantize.
        """
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
            (where, f"{MIXED} {lost[where]}" if where in lost and reason.startswith(BY_OVERRIDE) else reason)
            for where, reason in self.skipped
        ]

    def correct(self, batches: Iterable[Any], algorithms: Iterable[Algorithm] | None = None) -> None:
        """Hook: after `calibrate`, the algorithms of that stage (or those given), each on `batches`."""
        self._with_images(self.of_stage(CALIBRATED) if algorithms is None else list(algorithms), batches)

    def _with_images(self, chosen: list[Algorithm], batches: Iterable[Any]) -> None:
        given = batches if isinstance(self.example, Tensor) else map(self.tensors, batches)
        seen = given if len(chosen) < 2 else list(given)  # a generator serves one of them
        done = self.run_algorithms(chosen, self.graph, seen)
        idle = [name for name, reason in done.skipped if reason == NOTHING]
        self.about[IDLE] = [
            *self.about.get(IDLE, ()),
            *idle,
        ]  # in the checkpoint: a resumed run calls none of them

    def learn_from(self, model: nn.Module, teacher: nn.Module | None = None) -> None:
        """Says who teaches, and finds `schedule.distill_features` in both.

        Args:
            model: the float model of this module.
            teacher: None: the model itself.

        Raises:
            ConfigError: a feature that one of them does not have, or of another shape.
        """
        pairs = self.schedule.distill_features
        model = in_single_precision(model)[0].cpu().eval()
        other = model if teacher is None else in_single_precision(teacher)[0].cpu().eval()
        self.teacher, self._tapped = (other,), ()
        if pairs and self.of_stage(OBSERVED):
            allowed = "[] with an algorithm that divides the channels which would be compared (smooth_quant)"
            raise ConfigError("schedule.distill_features", ", ".join(pairs), allowed)
        if pairs:
            probe = with_drawn_norms(model)
            fused = self.run_algorithms(
                self.of_stage(FUSED), self.stub(self.fuse(probe).graph).graph, self.example
            )
            graph, tensors = self.prepare_qat(fused.graph).graph, self.tensors(self.example)
            self.features = find_features(graph, tensors, probe, other, pairs, self.example)


def _of_one(graph: fx.GraphModule, example: Example) -> Example:
    """A copy of `example` with one row along the batch axes of the graph's inputs, or as few as the graph takes."""
    tensors = flatten(example)
    return unflatten(
        example, [t.clone() for t in resized(tensors, batch_multiple(graph), graph_axes(graph, tensors))]
    )
