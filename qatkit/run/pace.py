"""Measures the speed of a run's model on its data within a second or two, for the estimates in the plan.

    a few samples ─┬─ loaded                            ─> seconds per sample, x the samples of a stage
                   ├─ float model, forward
                   ├─ copy of the prepared graph: calibration, simulation, training steps of two batch sizes
                   └─ first exported file, in ONNX Runtime (`of_first_file`)

Processor time is measured in one thread, and elapsed time with all threads (`qatkit.run.timing`). Each speed is
measured when it is first needed, so a resumed run measures only the speeds of its remaining stages. Measurements use
copies, and the random generators are restored afterwards, so the run's results do not change.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

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
from qatkit.run.timing import Parts, Span, Timing, clocks, timed, undisturbed
from qatkit.train.learner import FloatModule, Learner, make_optimizer
from qatkit.train.module import QATModule
from qatkit.verify.accuracy import all_cores
from qatkit_verify.feeds import rows
from qatkit_verify.session import open_session, run_outputs

_SHORT = 0.15  # processor seconds that a forward pass over the measured samples should take
_LONG = 0.1  # seconds of a call that is not repeated
_LOST = 4  # ratio of elapsed seconds to those expected in one thread above which every call is repeated
_FEWEST, _MOST = 4, 32  # number of measured samples
_CROWDED = 1.3  # ratio of elapsed to processor time above which the machine counts as shared
_VALUES = 2**18  # values of the inputs with which a file is timed
_COPIES = 4  # copies of the weights for a training step on a copy: weights, gradients, two moments


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
        self._total = Span(0.0, 0.0)  # of all calls in one thread

    @property
    def crowded(self) -> bool:
        """Returns whether other programs use the processor, so that estimates are rough."""
        return self._device.type == "cpu" and self._total.wall > _CROWDED * self._total.work > 0

    @property
    def load(self) -> float:
        """Returns the seconds to load and preprocess a sample with all worker processes."""
        return self._loaded / max(1, min(self.config.data.workers, all_cores()))

    @property
    def forward(self) -> float:
        """Returns the seconds of a sample in the float model on the CPU."""
        if "float" in self.files:
            return self._seconds(self.files["float"])
        return self._of_batch(self._forward, self.config.data.eval_batch_size)

    @property
    def calibration(self) -> Parts:
        """Returns the seconds of a calibration with the run's observer."""
        _, passed, end, searched = self._copied
        once = self._seconds(end)
        if searched is not None:
            search = searched.parts(self._wait)
            once += SAMPLE * search.each + SAMPLE / AT_ONCE * search.once
        return Parts(self._of_batch(passed, self.config.calibration.batch_size), once)

    @property
    def simulated(self) -> float:
        """Returns the seconds of a sample in the simulation on the training device."""
        return self._of_batch(self._simulated, self.config.data.eval_batch_size)

    @property
    def float_step(self) -> Parts:
        """Returns the seconds of a training step of the float model."""
        return self._float_step.parts(self._wait)

    @property
    def step(self) -> Parts:
        """Returns the seconds of a fine-tuning step of the quantized model, including the observers."""
        return self._qat_step.parts(self._wait)

    def file(self, name: str) -> float:
        """Returns the seconds of a sample in a file: "int8", "unoptimized", "converted", or "float".

        For "float", and for "int8" and "unoptimized" without a measurement, they are those of the float model,
        without the time that PyTorch's threads wait for each other.
        """
        if name in self.files:
            return self.files[name].wall if name == "converted" else self._seconds(self.files[name])
        if name == "converted":
            raise Unknown("the file was not run")
        return self.forward if "float" in self.files else self._forward.parts(self._wait).each

    @staticmethod
    def known(seconds: float | None) -> float:
        """Returns seconds that were measured elsewhere; raises `Unknown` for None."""
        if seconds is None:
            raise Unknown("")
        return seconds

    @property
    def _wait(self) -> float:
        """The elapsed seconds per processor second of one thread, from all measurements; infinite on a GPU."""
        measured = self._device.type == "cpu" and self._total.work > 0
        return max(1.0, self._total.wall / self._total.work) if measured else math.inf

    def _seconds(self, span: Span) -> float:
        """Returns the elapsed seconds of a call without the gaps in which other programs ran longer than usual."""
        return min(span.wall, span.work * self._wait) if span.work else span.wall

    def _of_batch(self, timing: Timing, size: int) -> float:
        """Returns the seconds of a sample in batches of `size`, or of the measured samples if they are more."""
        each, once = timing.parts(self._wait)
        return each + once / max(self.data.rows(size), timing.samples)

    def _alone(self, run: Callable[[], Any]) -> float:
        """Returns the processor seconds of a call in one thread, or its elapsed seconds on a GPU."""
        if self._device.type == "cuda":
            return timed(run, self._device).wall
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        span = timed(run)
        torch.set_num_threads(threads)
        self._total = Span(self._total.wall + span.wall, self._total.work + span.work)
        return span.work

    def _elapsed(self, run: Callable[[], Any], work: float) -> float:
        """Returns the elapsed seconds of a call with all threads.

        The call is made again if it was short, or much slower than in one thread; the faster of both calls counts.

        Args:
            run: the call.
            work: the processor seconds of the call in one thread.
        """
        first = timed(run, self._device).wall
        if _LONG < first < _LOST * work * self._wait:
            return first
        return min(first, timed(run, self._device).wall)

    def _timing(self, run: Callable[[], Any]) -> Timing:
        """Returns the timing of a call with the measured samples."""
        work = self._alone(run)
        return Timing(work / self._count, 0.0, self._count, self._elapsed(run, work))

    def _of_sizes(self, few: int, count: int, call_of: Callable[[int], Callable[[], Any]]) -> Timing:
        """Returns the timing of a call that is made with two numbers of samples."""
        small, large = call_of(few), call_of(count)
        self._alone(small)
        less = self._alone(small) if few < count else 0.0
        more = self._alone(large)
        return Timing.of_two(less, few, more, count, self._elapsed(large, more))

    @cached_property
    def _loaded(self) -> float:
        """The elapsed seconds to load a sample, which includes waiting for the disk."""
        count, seconds, calls = self._count, 0.0, 0
        with self._measuring("loading of data"):
            while seconds < _LONG:
                seconds += timed(lambda: self.data.first_batch(count)).wall
                calls += 1
        return seconds / (calls * count)

    @cached_property
    def _forward(self) -> Timing:
        model = self._float
        with self._measuring("forward pass"), inference(model):
            return self._timing(lambda: call(model, self._batch))

    @cached_property
    def _simulated(self) -> Timing:
        module = self._copied[0]
        with self._measuring("simulation"), inference(module.graph):
            set_phase(module.graph, observe=False, quantize=True)
            graph = settled_graph(module.graph.to(self._device)).eval()
            tensors = [one.to(self._device) for one in module.tensors(self._batch)]
            graph(*tensors)
            return self._timing(lambda: graph(*tensors))

    @cached_property
    def _float_step(self) -> Timing:
        self._check_room()
        with self._measuring("float step"):
            schedule = self.config.schedule
            return self._steps(FloatModule(copy_of(self._float), schedule, self.data.task), schedule.float_lr)

    @cached_property
    def _qat_step(self) -> Timing:
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
                each = self._alone(lambda: call(model, few)) / 2
        return self.data.rows(int(min(_MOST, max(_FEWEST, _SHORT / max(each, 1e-9)))))

    @cached_property
    def _batch(self) -> Any:
        return self.data.first_batch(self._count)

    @cached_property
    def _copied(self) -> tuple[QATModule, Timing, Span, Timing | None]:
        """A calibrated copy of the module, and the times of the parts of a calibration.

        The parts are a pass over samples, the choice of the ranges, and the search for mixed scales if there is one.
        """
        self._check_room()
        if self._module is None:
            raise Unknown("there is no module")
        with self._measuring("calibration"):
            module = copy.copy(self._module)
            module._modules = dict(self._module._modules)
            module.graph, module._tapped = cast(fx.GraphModule, copy_of(self._module.graph)), ()
            few, threads, now = self.data.first_batch(2), torch.get_num_threads(), list[Span]()

            def batches() -> Iterator[Any]:
                for batch, used in ((few, 1), (self._batch, 1), (self._batch, threads)):
                    torch.set_num_threads(used)
                    now.append(clocks())
                    yield module.tensors(batch)
                now.append(clocks())
                torch.set_num_threads(1)

            calibrate(module.graph, batches())
            end, alone = clocks().less(now[3]), now[2].less(now[1])
            torch.set_num_threads(threads)
            passed = Timing(alone.work / self._count, 0.0, self._count, now[3].less(now[2]).wall)
            searches = module.quantize and not module.backend.simulated and fake_quantizers(module.graph)
            return module, passed, end, self._search(module) if searches else None

    def _search(self, module: QATModule) -> Timing:
        """Returns the timing of a pass of the search for mixed scales."""

        def of(samples: int) -> Callable[[], Any]:
            given = [module.tensors(self.data.first_batch(samples))]
            return lambda: mixed_scales(module.graph, given)

        return self._of_sizes(1, self.data.rows(2), of)

    def _steps(self, learner: Learner, lr: float) -> Timing:
        """Returns the timing of a training step.

        The steps change the weights of the learner, which has to be a copy.
        """
        if self.config.trainer.compile:
            raise Unknown("trainer.compile")
        learner.graph.to(self._device).train()
        optimizer = make_optimizer(learner.graph, self.config.schedule, lr)

        def of(samples: int) -> Callable[[], Any]:
            images, targets = self._training_batch(samples)

            def step() -> None:
                optimizer.zero_grad()
                with self._precision():
                    loss = learner.loss(images, targets)
                loss.backward()
                optimizer.step()

            return step

        return self._of_sizes(self.data.rows(2), self._count, of)

    def _training_batch(self, samples: int) -> tuple[Any, Any]:
        images, targets = self.data.training_batch(samples)
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
