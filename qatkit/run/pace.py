"""Measures the speed of a run's model on its data within a second or two, for the estimates in the plan.

    a few samples ─┬─ loaded                            ─> seconds per sample, x the samples of a stage
                   ├─ float model, forward
                   ├─ copy of the prepared graph: calibration, simulation, training steps of two batch sizes
                   └─ first exported file, in ONNX Runtime (`of_first_file`)

Each speed is measured when it is first needed, so a resumed run measures only the speeds of its remaining
stages. Measurements use copies, and the random generators are restored afterwards, so the run's results do
not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from qatkit.calibration.mixed_scales import AT_ONCE, SAMPLE, mixed_scales
from qatkit.calibration.observe import calibrate
from qatkit.config.schema import Config
from qatkit.data import DataModule
from qatkit.data.inputs import Inputs
from qatkit.export.converted_reference import ConvertedReference
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.precomputed import settled_graph
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.signature import call
from qatkit.graph.trace import copy_of
from qatkit.run.build import examples
from qatkit.run.loop.fit import on_gpu
from qatkit.run.memory import available_memory
from qatkit.run.timing import Span, clocks, timed, undisturbed
from qatkit.train.learner import FloatModule, Learner, make_optimizer
from qatkit.train.module import QATModule
from qatkit.verify.accuracy import all_cores
from qatkit_verify.feeds import rows
from qatkit_verify.session import open_session, run_outputs

_SHORT = 0.15  # seconds that a forward pass over the measured samples should take
_FEWEST, _MOST = 4, 32  # number of measured samples
_CROWDED = 1.3  # ratio of elapsed to processor time above which the machine counts as shared
_VALUES = 2**18  # values of the inputs with which a file is timed
_COPIES = 4  # copies of the weights for a training step on a copy: weights, gradients, two moments


class Parts(NamedTuple):
    """The time of a calibration or of a training step in seconds.

    Attributes:
        each: the time per sample.
        once: the constant part.
    """

    each: float
    once: float


class Unknown(Exception):  # noqa: N818  no error: a stage without an estimate
    """Raised for a speed that could not be measured; the message says why."""


class Pace:
    """The speeds of a run. Each method raises `Unknown` if its speed cannot be measured.

    Args:
        config: the configuration of the run.
        data: the data of the run.
        model: the float model, which is not changed; None for a file from which no module was made.
        module: the prepared module before its calibration; None for a run without one.
        files: the known times per sample of files, by name (`of_first_file`).
    """

    def __init__(
        self,
        config: Config,
        data: DataModule,
        model: nn.Module | None,
        module: QATModule | None,
        files: Mapping[str, Span],
    ) -> None:
        self.config, self.data, self.files = config, data, files
        self._model, self._module = model, module
        self._failed = dict[str, str]()
        self._total = Span(sum(one.wall for one in files.values()), sum(one.work for one in files.values()))

    @property
    def load(self) -> float:
        """Returns the seconds to load and preprocess a sample with all worker processes."""
        return self._loaded.wall / max(1, self.config.data.workers)  # loading also waits for the disk

    @property
    def forward(self) -> float:
        """Returns the seconds of a sample in the float model on the CPU."""
        return self._seconds(self._forward)

    @property
    def calibration(self) -> Parts:
        """Returns the seconds of a calibration with the run's observer."""
        return Parts(*map(self._seconds, self._copied[1:]))

    @property
    def simulated(self) -> float:
        """Returns the seconds of a sample in the simulation on the training device."""
        return self._seconds(self._simulated)

    @property
    def float_step(self) -> Parts:
        """Returns the seconds of a training step of the float model."""
        return Parts(*map(self._seconds, self._float_step))

    @property
    def step(self) -> Parts:
        """Returns the seconds of a fine-tuning step of the quantized model, including the observers."""
        return Parts(*map(self._seconds, self._qat_step))

    def file(self, name: str) -> float:
        """Returns the seconds of a sample in a file: "int8", "unoptimized", "converted", or "float".

        For "int8" and "unoptimized" without a measurement, they are those of the float model.
        """
        if name == "float" or (name not in self.files and name != "converted"):
            return self.forward
        if name not in self.files:
            raise Unknown("the file was not run")
        return self._seconds(self.files[name])

    @staticmethod
    def known(seconds: float | None) -> float:
        """Returns seconds that were measured elsewhere; raises `Unknown` for None."""
        if seconds is None:
            raise Unknown("")
        return seconds

    def _seconds(self, span: Span) -> float:
        """Returns the expected duration of a call that took `span`.

        On a shared machine, the processor time of a short call is more reliable than its waiting time. The
        duration is then its processor time, multiplied by the ratio of elapsed to processor time of all
        measurements so far.
        """
        total = self._total
        crowded = self._device.type == "cpu" and total.wall > _CROWDED * total.work > 0
        return span.work * total.wall / total.work if crowded else span.wall

    def _timed(self, run: Callable[[], Any]) -> Span:
        span = timed(run, self._device)
        self._total = Span(self._total.wall + span.wall, self._total.work + span.work)
        return span

    @cached_property
    def _loaded(self) -> Span:
        count = self._count
        with self._measuring("loading of data"):
            return timed(lambda: self.data.first_batch(count)).times(1 / count)

    @cached_property
    def _forward(self) -> Span:
        if "float" in self.files:
            return self.files["float"]
        model = self._float
        with self._measuring("forward pass"), inference(model):
            return self._timed(lambda: call(model, self._batch)).times(1 / self._count)

    @cached_property
    def _simulated(self) -> Span:
        module = self._copied[0]
        with self._measuring("simulation"), inference(module.graph):
            set_phase(module.graph, observe=False, quantize=True)
            graph = settled_graph(module.graph.to(self._device)).eval()
            tensors = [one.to(self._device) for one in module.tensors(self._batch)]
            graph(*tensors)
            return self._timed(lambda: graph(*tensors)).times(1 / self._count)

    @cached_property
    def _float_step(self) -> tuple[Span, Span]:
        self._check_room()
        with self._measuring("float step"):
            schedule = self.config.schedule
            return self._steps(FloatModule(copy_of(self._float), schedule, self.data.task), schedule.float_lr)

    @cached_property
    def _qat_step(self) -> tuple[Span, Span]:
        module, schedule = self._copied[0], self.config.schedule
        with self._measuring("step"):
            module.learn(self.data.task)
            module.begin()
            set_phase(module.graph, observe=schedule.freeze_observers > 0, quantize=True)
            try:
                return self._steps(module, schedule.lr)
            finally:
                for teacher in module.teacher:  # the run's own model, moved there by the loss
                    teacher.cpu()

    @property
    def _float(self) -> nn.Module:
        if self._model is None:
            raise Unknown("there is no model")
        return self._model

    @cached_property
    def _device(self) -> torch.device:
        return torch.device("cuda" if on_gpu(self.config.trainer) else "cpu")

    @cached_property
    def _count(self) -> int:
        """The number of samples to measure, chosen so that the float model takes about `_SHORT` seconds for them."""
        if "float" in self.files:
            each = self.files["float"].work
        else:
            model = self._float
            with self._measuring("model"), inference(model):
                few = self.data.first_batch(2)
                call(model, few)
                each = self._timed(lambda: call(model, few)).work / 2
        return self.data.rows(int(min(_MOST, max(_FEWEST, _SHORT / max(each, 1e-9)))))

    @cached_property
    def _batch(self) -> Any:
        return self.data.first_batch(self._count)

    @cached_property
    def _copied(self) -> tuple[QATModule, Span, Span]:
        """A copy of the module, calibrated on a few samples; its calibration time per sample, and the constant part."""
        self._check_room()
        if self._module is None:
            raise Unknown("there is no module")
        with self._measuring("calibration"):
            module = copy.copy(self._module)
            module._modules = dict(self._module._modules)
            module.graph, module._tapped = cast(fx.GraphModule, copy_of(self._module.graph)), ()
            few, now = self.data.first_batch(2), list[Span]()

            def batches() -> Iterator[Any]:
                for batch in (few, self._batch):
                    now.append(clocks())
                    yield module.tensors(batch)
                now.append(clocks())

            calibrate(module.graph, batches())
            once = clocks().less(now[2])
            if module.quantize and not module.backend.simulated and fake_quantizers(module.graph):
                searched = self._search(module)
                once = Span(once.wall + searched.wall, once.work + searched.work)
        return module, now[2].less(now[1]).times(1 / self._count), once

    def _search(self, module: QATModule) -> Span:
        """Returns the time of the search for mixed scales, including the constant cost of its passes."""

        def taken(samples: int) -> Span:
            given = [module.tensors(self.data.first_batch(samples))]
            return self._timed(lambda: mixed_scales(module.graph, given))

        if self.data.rows(2) == 1:
            return taken(1).times(SAMPLE)
        one, two = taken(1), taken(2)
        each = two.less(one)
        once = one.less(each).times(SAMPLE / AT_ONCE)
        return Span(once.wall + SAMPLE * each.wall, once.work + SAMPLE * each.work)

    def _steps(self, learner: Learner, lr: float) -> tuple[Span, Span]:
        """Returns a training step's time per sample and its constant part, from two batch sizes.

        The steps change the weights of the learner, which has to be a copy.
        """
        if self.config.trainer.compile:
            raise Unknown("trainer.compile")
        learner.graph.to(self._device).train()
        optimizer = make_optimizer(learner.graph, self.config.schedule, lr)
        few, count = self.data.rows(2), self._count

        def taken(samples: int) -> Span:
            images, targets = self._training_batch(samples)

            def step() -> None:
                optimizer.zero_grad()
                with self._precision():
                    loss = learner.loss(images, targets)
                loss.backward()
                optimizer.step()

            return self._timed(step)

        taken(few)
        small, large = taken(few), taken(count)
        if count == few:
            return large.times(1 / count), Span(0.0, 0.0)
        each = large.less(small).times(1 / (count - few))
        return each, small.less(each.times(few))

    def _training_batch(self, samples: int) -> tuple[Any, Any]:
        loader = self.data.train_dataloader()
        keys = [(0, index) for index in self.data.calibration_indices(samples)]
        images, targets = loader.dataset.__getitems__(keys)  # type: ignore[attr-defined]
        return _on(images, self._device), _on(targets, self._device)

    def _precision(self) -> AbstractContextManager[Any]:
        kinds = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
        kind = kinds.get(self.config.trainer.precision)
        return nullcontext() if kind is None else torch.autocast(self._device.type, kind)

    def _check_room(self) -> None:
        """Raises Unknown if a copy of the model would leave too little memory."""
        room, needed = available_memory(), _COPIES * sum(one.nbytes for one in self._float.parameters())
        if room is not None and 2 * needed > room:
            raise Unknown("too little memory to try it on a copy")

    @contextmanager
    def _measuring(self, what: str) -> Iterator[None]:
        """Restores the random generators on exit, and turns any error into `Unknown`."""
        if what in self._failed:
            raise Unknown(self._failed[what])
        try:
            with undisturbed(cuda=self._device.type == "cuda"):
                yield
        except Unknown as error:
            self._failed[what] = str(error)
            raise
        except Exception as error:  # the stage itself will report an error of the model
            self._failed[what] = f"the {what} could not be timed"
            raise Unknown(self._failed[what]) from error


def of_first_file(
    path: Path, converted: fx.GraphModule, config: Config, inputs: Inputs, options: Mapping[str, str]
) -> dict[str, Span]:
    """Returns the times per sample of a file and of the module from which it was made, for `Pace.files`.

    The result is {} if one of them does not run; the verification will report why.
    """
    try:
        fitting = max(2, min(_MOST, 4 * _VALUES // max(1, inputs.bytes)))
        batch = inputs.example(fitting if config.export.dynamic_batch else examples(config))
        runs: dict[str, Callable[[], Any]] = {"converted": partial(ConvertedReference(converted), batch)}
        for name, optimize in (("int8", True), ("unoptimized", False)):
            session = open_session(path, threads=all_cores(), options=options, optimize=optimize)
            runs[name] = partial(run_outputs, session, batch)
        found = dict[str, Span]()
        with undisturbed():
            for name, run in runs.items():
                run()
                found[name] = timed(run).times(1 / rows(batch))
    except Exception:  # any error of a runtime or module
        return {}
    return found


def _on(value: Any, device: torch.device) -> Any:
    """Returns a batch (a tensor, or a mapping from names to tensors) on a device."""
    if isinstance(value, dict):
        return {name: _on(one, device) for name, one in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value
