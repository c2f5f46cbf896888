"""Records runs of a model to make a graph for as many batch sizes as possible.

1. Batches of two and of three samples are recorded. Numbers that differ become functions of the batch size.
2. If the model cuts its batch into parts or does not accept these sizes, batches of 2·n and 3·n samples are
   recorded for the divisors n > 1 of the example's batch size, until one n works.
3. A model that accepts no other batch size is recorded with that of the example.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from qatkit.graph.attention import self_attention
from qatkit.graph.attention.self_attention import unusual_call
from qatkit.graph.capture.batch import merge
from qatkit.graph.capture.batch_axes import Axes, independent_axes
from qatkit.graph.capture.calls import UntraceableError
from qatkit.graph.capture.image_kernels import open_image_kernels
from qatkit.graph.capture.pieces import may_halve
from qatkit.graph.capture.run import Recording, kept_buffers, record
from qatkit.graph.capture.training_paths import follow_paths
from qatkit.graph.nodes import classifies_in_training
from qatkit.graph.signature import (
    Example,
    batch_axes,
    batch_size,
    call,
    is_whole,
    other_values,
    output_leaves,
    resized,
    unflatten,
)
from qatkit_verify.errors import ConfigError
from qatkit_verify.foreign import described

SIZES: tuple[int, int] = (2, 3)


class ForAnyBatch(NamedTuple):
    """A recording and the batches that its graph accepts.

    Attributes:
        one: the recording.
        opened: paths of attention modules that are not recorded as leaves.
        sizes: batch sizes of the two runs; empty for a model that accepts only the example's batch size.
        axes: the batch axis of each input, or None.
    """

    one: Recording
    opened: frozenset[str]
    sizes: tuple[int, ...]
    axes: Axes


class Runs:
    """Runs one model at several sizes, with and without recording.

    Args:
        model: a copy of the model, which runs may change.
        example: an example input of the model.
        names: names of the inputs.
        tensors: the tensors of the example.
        blocks: paths of modules that are recorded in training mode (`qatkit.graph.capture.training_paths`).
    """

    def __init__(
        self,
        model: nn.Module,
        example: Example,
        names: Sequence[str],
        tensors: tuple[Tensor, ...],
        blocks: Sequence[str] = (),
    ) -> None:
        self.model, self.example, self.names, self.tensors = model, example, names, tensors
        self.blocks = blocks

    def for_any_batch(self) -> ForAnyBatch:
        """Returns the recording for as many batch sizes as possible.

        These are all sizes, else the multiples of a divisor of the example's batch size, else only the
        example's.

        Raises:
            UntraceableError: a line of the model can't be recorded.
            ConfigError: the model fails on the example.
        """
        found: ForAnyBatch | UntraceableError
        try:
            found = self._twice()
        except UntraceableError as error:
            found = error
        some = not isinstance(found, UntraceableError) and bool(found.sizes)
        if not isinstance(found, UntraceableError) and some and not found.one.shares:
            return found
        images = batch_size(self.tensors, batch_axes(self.tensors))
        for factor in [number for number in range(2, images + 1) if images % number == 0]:
            with contextlib.suppress(UntraceableError, ConfigError):
                other = self._along_axes(factor)
                if other.sizes and (other.one.shares or not some):
                    return other
        if isinstance(found, UntraceableError):
            raise found
        return found

    def record(self, tensors: Sequence[Tensor], opened: frozenset[str]) -> Recording:
        """Records one run with traced sizes (`qatkit.graph.capture.traced_sizes`).

        Raises:
            UntraceableError: a line of the model can't be recorded.
        """
        self.set_mode()
        try:
            one = self._record(tensors, opened, trace_sizes=True)
        except UntraceableError:
            with _compiling():
                one = self._record(tensors, opened, trace_sizes=True)
        open_image_kernels(one.graph)
        return one

    def answers(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the outputs of the model; its buffers are restored afterwards."""
        self.set_mode()
        eager = torch.compiler.set_stance("force_eager")
        with torch.no_grad(), eager, kept_buffers(self.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return output_leaves(call(self.model, self._call(tensors)))[1]

    def computed(self, one: Recording, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the outputs that the graph of a recording computes for `tensors`."""
        with torch.no_grad(), kept_buffers(self.model):
            found = _Recorded(self.model, one).run(*(t.clone() for t in tensors))
        return found if isinstance(found, tuple) else (found,)

    def set_mode(self) -> None:
        """Sets inference mode, except for `blocks`, which run in training mode.

        torchvision's GoogLeNet and Inception call their auxiliary heads only in training. All their modules with
        children therefore run in training mode.
        """
        self.model.train()  # some models then drop what they had cached for inference
        self.model.eval()
        if classifies_in_training(self.model):
            for module in self.model.modules():
                module.training = any(True for _ in module.children())
        follow_paths(self.model, self.blocks)

    def _call(self, tensors: Sequence[Tensor]) -> Example:
        return unflatten(self.example, [t.clone() for t in tensors])

    def _record(
        self, tensors: Sequence[Tensor], opened: frozenset[str], *, trace_sizes: bool = False
    ) -> Recording:
        return record(self.model, self.example, tensors, self.names, opened, trace_sizes=trace_sizes)

    def _twice(self) -> ForAnyBatch:
        try:
            return self._along_axes(1)
        except UntraceableError:
            # A second run finds what the first one cached (tables of positions). Code that asks whether it is
            # being compiled leaves out shortcuts that depend on values.
            with _compiling():
                return self._along_axes(1)

    def _along_axes(self, factor: int) -> ForAnyBatch:
        """Returns the recording for batch sizes that are multiples of `factor`.

        An axis may be as long as the batch only by chance (in a mask of positions). Therefore, combinations that
        leave out some axes are tried too, unless the model declares its batch axes.
        """
        known = _declared_axes(self.model, self.names)
        guesses = [known] if known else _guesses(batch_axes(self.tensors))
        if not known:
            found_axes = independent_axes(self.model, self.tensors, self.answers)
            guesses = guesses if found_axes is None else [found_axes, *guesses]
        first: ForAnyBatch | Exception | None = None
        for axes in guesses:
            try:
                found = self._along(axes, factor)
            except (UntraceableError, ConfigError) as error:
                first = first or error
                continue
            if found.sizes:
                return found
            first = first or found
        assert first is not None
        if isinstance(first, Exception):
            raise first
        return first

    def _along(self, axes: Axes, factor: int) -> ForAnyBatch:
        self.set_mode()
        one, opened, sizes = self._first(axes, factor)
        if not sizes:
            return ForAnyBatch(one, opened, sizes, axes)
        other = self._second(resized(self.tensors, sizes[1], axes), opened)
        if other is None:
            return ForAnyBatch(one, opened, (), axes)
        first, axis = next((i, axis) for i, axis in enumerate(axes) if axis is not None)
        if factor > 1 and not self._takes_multiples(factor, axes, opened, other):
            return ForAnyBatch(one, opened, (), axes)
        halves = factor == 1 and may_halve(one, other)
        one.shares = merge(one, other, SIZES, (first, axis), factor) or halves
        open_image_kernels(one.graph)
        return ForAnyBatch(one, opened, sizes, axes)

    def _takes_multiples(self, factor: int, axes: Axes, opened: frozenset[str], run: Recording) -> bool:
        """Returns whether the example and a batch of `factor` samples make the same calls as `run`."""
        few = resized(self.tensors, factor, axes)
        try:
            return all(_alike(run, self._record(tensors, opened)) for tensors in (self.tensors, few))
        except UntraceableError:
            raise
        except Exception:  # a forward may raise anything
            return False

    def _first(self, axes: Axes, factor: int) -> tuple[Recording, frozenset[str], tuple[int, ...]]:
        """Returns the first run, the paths of attention modules that had to be opened, and the batch sizes.

        There are no batch sizes if the model accepts only the example's batch.
        """
        sizes = tuple(factor * size for size in SIZES) if any(axis is not None for axis in axes) else ()
        given = resized(self.tensors, sizes[0], axes) if sizes else self.tensors
        try:
            one = self._record(given, frozenset())
        except UntraceableError:
            raise
        except Exception as error:  # a forward may raise anything
            if not sizes or batch_size(self.tensors, axes) == sizes[0]:
                raise _no_call(self.model, error) from error
            sizes, given = (), self.tensors
            try:
                one = self._record(given, frozenset())
            except UntraceableError:
                raise
            except Exception as again:
                raise _no_call(self.model, again) from again
        opened = frozenset(
            str(node.target)
            for node in one.graph.nodes
            if node.op == "call_module"
            and isinstance(module := self.model.get_submodule(str(node.target)), nn.MultiheadAttention)
            and (self_attention.why_not(module) or unusual_call(node))
        )
        return (self._record(given, opened) if opened else one), opened, sizes

    def _second(
        self, tensors: tuple[Tensor, ...], opened: frozenset[str], *, whole: bool = True
    ) -> Recording | None:
        """Returns a run with other values; None if it fails.

        Integer inputs keep the given values if the model accepts no others.
        """
        self.set_mode()
        try:
            return self._record(other_values(tensors, seed=0, whole=whole), opened)
        except UntraceableError:
            raise
        except Exception:  # a forward may raise anything
            again = whole and any(map(is_whole, tensors))
        return self._second(tensors, opened, whole=False) if again else None


class _Recorded(fx.Interpreter):
    """Runs a recording with the parameters and buffers of the recorded model."""

    def __init__(self, model: nn.Module, one: Recording) -> None:
        super().__init__(model, graph=one.graph)
        self._constants = one.constants

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        known = self._constants.get(target)
        return super().get_attr(target, args, kwargs) if known is None else known


def _alike(one: Recording, other: Recording) -> bool:
    """Returns whether two runs made the same calls."""
    return [node.target for node in one.graph.nodes] == [node.target for node in other.graph.nodes]


def _declared_axes(model: nn.Module, names: Sequence[str]) -> Axes:
    """Returns the batch axis of each input from the model's attribute `batch_axes`; empty if it has none."""
    declared: Mapping[str, int | None] | None = getattr(model, "batch_axes", None)
    if not isinstance(declared, Mapping):
        return ()
    if len(names) == 1 and len(declared) == 1:
        return tuple(declared.values())
    return tuple(declared.get(name) for name in names)


def _guesses(axes: Axes) -> list[Axes]:
    """Returns variants of `axes`: all of them, all but one, and each one by itself."""
    given = [i for i, axis in enumerate(axes) if axis is not None]
    if len(given) < 2:
        return [axes]
    without = [[i for i in given if i != left] for left in reversed(given)]
    kept = [given, *without, *([i] for i in given)]
    found = [tuple(axis if i in one else None for i, axis in enumerate(axes)) for one in kept]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` return True, as it does while torch.compile traces a model."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _no_call(model: nn.Module, error: Exception) -> Exception:
    """Returns an error of the forward as a ConfigError, and an error of the recorder itself unchanged."""
    if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent == Path(__file__).parent:
        return error
    reason = f"the model failed on the example input ({described(error)})"
    return ConfigError("model.name", type(model).__name__, reason=reason)
