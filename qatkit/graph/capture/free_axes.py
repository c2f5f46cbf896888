"""Finds axes other than the batch whose size a model leaves free: lengths, heights and widths, numbers of streams.

1. The model runs with other sizes of one axis after the other, and then of all free axes together. These runs trace
   sizes (`qatkit.graph.capture.traced_sizes`).
2. The runs are merged into one graph, which computes numbers that differ between them from sizes.
3. The graph is compared with the model, if possible at sizes that no run had.

An axis stays fixed if its size decides what is computed, if the model fails at other sizes, or if a layer has
weights for one size only. A note gives the reason, except for weights. If the configuration names the axis, a
fixed axis is an error. If the model needs multiples (of 8 rows, say), so does the graph.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from qatkit.graph.capture.axis_sizes import FreeAxis, Place, distant_sizes, sizes_between
from qatkit.graph.capture.batch import merge_with
from qatkit.graph.capture.calls import UntraceableError
from qatkit.graph.capture.differences import relative_difference
from qatkit.graph.capture.merged_sizes import Shapes, check_forms, fold_fixed, sizes_in_run
from qatkit.graph.capture.run import Recording
from qatkit.graph.capture.runs import Runs
from qatkit.graph.signature import other_values, resized
from qatkit_verify.errors import ConfigError
from qatkit_verify.foreign import described

Wanted = str | Mapping[str, Mapping[int, str]]  # "auto", "none", or names of axes by input
_DECIDES = "the size decides what is computed"
_STEPS = (1, 2, 4, 8, 16, 32, 64)
_NAMES = {4: {2: "height", 3: "width"}, 5: {2: "depth", 3: "height", 4: "width"}}
_CLOSE = 1e-3  # relative to the largest output; a larger difference is not rounding


Check = Callable[[FreeAxis], None]  # raises where an axis is not free


class FreeAxes:
    """The search for the free axes of one model.

    Args:
        wanted: "auto", or names for axes that have to be free, by input and number of the axis.
        runs: the runs of the model.
        opened: paths of attention modules that are not recorded as leaves.
        batches: two batch sizes to run the model with; empty if it accepts only that of the example.
        batch_axes: the batch axis of each input, or None.
    """

    def __init__(
        self,
        wanted: Wanted,
        runs: Runs,
        opened: frozenset[str],
        batches: tuple[int, ...],
        batch_axes: tuple[int | None, ...],
    ) -> None:
        self.wanted, self.runs, self.opened = wanted, runs, opened
        self.names, self.tensors = runs.names, runs.tensors
        self.batches, self.batch_axes = batches, batch_axes
        self.notes: list[tuple[str, str]] = []
        self.reasons: dict[tuple[Place, ...], str] = {}  # why a smaller step does not work

    def run(self) -> tuple[Recording | None, list[FreeAxis]]:
        """Returns the graph for all free axes (None if there are none) and the free axes.

        Raises:
            ConfigError: an axis in `wanted` is not free or does not exist, or is the batch axis.
        """
        self._check_wanted()
        found = self._each(self._run)
        try:
            one = self._merged(found, compare=True) if found else None
        except (
            UntraceableError,
            _NotFreeError,
        ):  # the axes are not free all at once, or not with these steps
            self.notes.clear()
            one, found = self._most(self._each(self._merge_alone))
        asked = not isinstance(self.wanted, str)
        found = [replace(axis, name=self._name(axis, len(found)), asked=asked) for axis in found]
        self.notes += [
            (
                self._of(axis),
                f"its size ({axis.name}) must be a multiple of {axis.step}: {self.reasons[axis.places]}",
            )
            for axis in found
            if axis.step > 1
        ]
        return one, found

    def _most(self, found: list[FreeAxis]) -> tuple[Recording | None, list[FreeAxis]]:
        while found:
            try:
                return self._merged(found, compare=True), found
            except (UntraceableError, _NotFreeError) as error:
                self._stays_fixed(found.pop(), error)
        return None, []

    def _each(self, check: Check) -> list[FreeAxis]:
        """Returns the axes that `check` finds to be free, each tested separately."""
        found: list[FreeAxis] = []
        for number, groups in enumerate(self._candidates()):
            if any(place in axis.places for axis in found for place in groups[0]):
                continue
            axis = self._first_free(groups, number, check)
            found += [axis] if axis is not None else []
        return found

    def _check_wanted(self) -> None:
        """Rejects names of inputs and axes that the model does not have, and the batch axis.

        Raises:
            ConfigError: an input or axis does not exist, or is the batch axis.
        """
        for name, axes in self.wanted.items() if not isinstance(self.wanted, str) else ():
            if name not in self.names:
                allowed = f"an input of the model ({', '.join(self.names)})"
                raise ConfigError("export.dynamic_axes", name, allowed)
            rank = self.tensors[self.names.index(name)].ndim
            batch = self.batch_axes[self.names.index(name)] if self.batches else None
            for axis in axes:
                if not 0 <= axis < rank or axis == batch:
                    others = ", ".join(str(one) for one in range(rank) if one != batch)
                    besides = "" if batch is None else " other than the batch axis"
                    allowed = f"an axis of the input{besides} ({others or 'it has none'})"
                    raise ConfigError(f"export.dynamic_axes.{name}", axis, allowed)

    def _candidates(self) -> Iterator[list[tuple[Place, ...]]]:
        """Yields, for each axis, groups of axes to resize together, in the order in which they are tried.

        A group is the axis, alone or with equally long axes that may have to change with it. If the
        configuration names axes, the only group consists of the axes with the same name.
        """
        if not isinstance(self.wanted, str):
            named: dict[str, list[Place]] = {}
            for input_name, axes in self.wanted.items():
                for axis, name in axes.items():
                    named.setdefault(name, []).append((self.names.index(input_name), axis))
            yield from ([tuple(places)] for places in named.values())
            return
        places = [
            (i, axis)
            for i, tensor in enumerate(self.tensors)
            for axis in range(tensor.ndim)
            if tensor.shape[axis] > 1 and not (self.batches and axis == self.batch_axes[i])
        ]
        for place in places:
            size = self._size(place)
            same = [other for other in places if other != place and self._size(other) == size]
            elsewhere = [other for other in same if other[0] != place[0]]
            first: dict[int, Place] = {}
            for other in elsewhere:
                first.setdefault(other[0], other)
            # Inputs of the same shape, such as keys and values, come first, since some attention kernels do not
            # check that their sizes agree.
            shape = self.tensors[place[0]].shape
            alike = [
                other for other in elsewhere if other[1] == place[1] and self.tensors[other[0]].shape == shape
            ]
            groups = [
                (place, *alike),
                (place,),
                (place, *elsewhere),
                (place, *first.values()),
                (place, *same),
            ]
            yield list(dict.fromkeys(groups))

    def _size(self, place: Place) -> int:
        return self.tensors[place[0]].shape[place[1]]

    def _first_free(self, groups: Sequence[tuple[Place, ...]], number: int, check: Check) -> FreeAxis | None:
        reason: Exception | None = None
        for places in groups:
            try:
                return self._free(places, number, check)
            except (UntraceableError, _NotFreeError) as error:
                reason = reason or error
        assert reason is not None
        self._stays_fixed(FreeAxis("", groups[0], self._size(groups[0][0]), (), 1), reason)
        return None

    def _free(self, places: tuple[Place, ...], number: int, check: Check) -> FreeAxis:
        """Returns the axis at `places`, with a distant and a near size that the model accepts, and its step.

        Raises:
            UntraceableError, _NotFreeError: the model accepts no other size, or none close to the example's.
        """
        size = self._size(places[0])
        reason: Exception = _NotFreeError("the model accepts no other size")
        for other in distant_sizes(size, number, self.tensors[places[0][0]].ndim):
            axis = FreeAxis("", places, size, (other,), 1)
            try:
                check(axis)
            except (UntraceableError, _NotFreeError) as error:
                if isinstance(error, UntraceableError) and other > size:
                    raise  # a smaller size might work and hide that a larger one does not
                reason = error
                continue
            return self._with_step(axis, check)
        raise reason

    def _run(self, axis: FreeAxis) -> None:
        self._recorded({axis: axis.others[-1]}, self.batches[0] if self.batches else None)

    def _merge_alone(self, axis: FreeAxis) -> None:
        self._merged([axis], compare=False)

    def _with_step(self, axis: FreeAxis, check: Check) -> FreeAxis:
        """Returns the axis with the smallest step that the model accepts."""
        far = axis.others[0]
        for step in _STEPS:
            if axis.size % step or far % step:
                break
            for near in (axis.size + step, axis.size - step):
                if near < 1:
                    continue
                found = FreeAxis("", axis.places, axis.size, (far, near), step)
                try:
                    check(found)
                except (UntraceableError, _NotFreeError) as error:
                    self.reasons[axis.places] = _in_words(error)
                    if isinstance(error, UntraceableError):
                        break  # the size on the other side proves nothing
                    continue
                return found
        raise _NotFreeError(
            f"the model accepts sizes {axis.size} and {far}, but no size close to {axis.size}"
        )

    def _merged(self, axes: Sequence[FreeAxis], *, compare: bool) -> Recording:
        """Returns the graph merged from runs with the example's sizes, all distant ones and, if known, all near ones.

        Args:
            compare: whether the graph is compared with the model (`_compare`).
        """
        batch, more = self.batches or (None, None)
        one = self._recorded({}, batch)
        others = [self._recorded({axis: axis.others[0] for axis in axes}, more)]
        if all(len(axis.others) > 1 for axis in axes):
            others.append(self._recorded({axis: axis.others[1] for axis in axes}, batch))
        graphs = [other.graph for other in others]
        check_forms(one.graph, graphs)
        values = [sizes_in_run(run.graph) for run in (one, *others)]
        merge_with(one, others, Shapes(one.graph, graphs), _DECIDES)
        fold_fixed(one.graph, values)
        if compare:
            self._compare(one, axes, batch)
        return one

    def _compare(self, one: Recording, axes: Sequence[FreeAxis], batch: int | None) -> None:
        """Raises _NotFreeError unless graph and model agree at the first sizes that the model accepts, if any.

        Sizes that no run had are tried first, then those of the last run.
        """
        between = [sizes_between(axes, more) for more in range(3)]
        for sizes in (*between, {axis: axis.others[-1] for axis in axes}):
            tensors = self._inputs(sizes, batch)
            try:
                expected = self.runs.answers(tensors)
            except Exception:  # noqa: S112  whatever a forward raises: the model does not accept one of the sizes
                continue
            found = ", ".join(f"{axis.size} → {size}" for axis, size in sizes.items())
            try:
                answers = zip(expected, self.runs.computed(one, tensors), strict=True)
                largest = max(relative_difference(*pair) for pair in answers)
            except Exception as error:  # like an error of the model
                raise _NotFreeError(
                    f"the graph fails at another size, {found} ({described(error)})"
                ) from error
            if largest > _CLOSE:
                raise _NotFreeError(
                    f"the graph and the model differ by {100 * largest:.2g} % of the output at another size ({found})"
                )
            return

    def _recorded(self, sizes: Mapping[FreeAxis, int], batch: int | None) -> Recording:
        tensors = self._inputs(sizes, batch)
        given = other_values(tensors, seed=len(sizes), whole=False) if sizes else tensors
        try:
            return self.runs.record(given, self.opened)
        except UntraceableError:
            raise
        except Exception as error:  # a forward may raise anything
            if _of_weights(error):
                raise _HasWeightsError from error
            raise _NotFreeError(f"the model failed at another size ({described(error)})") from error

    def _inputs(self, sizes: Mapping[FreeAxis, int], batch: int | None) -> tuple[Tensor, ...]:
        tensors = self.tensors if batch is None else resized(self.tensors, batch, self.batch_axes)
        return with_sizes(tensors, {place: size for axis, size in sizes.items() for place in axis.places})

    def _name(self, axis: FreeAxis, count: int) -> str:
        i, along = axis.places[0]
        if not isinstance(self.wanted, str):
            return self.wanted[self.names[i]][along]
        usual = _NAMES.get(self.tensors[i].ndim, {}).get(along)
        if usual and len(self.tensors) == 1:
            return usual
        return "length" if count == 1 else f"{self.names[i]}_{along}"

    def _of(self, axis: FreeAxis) -> str:
        return ", ".join(f"{self.names[i]}, axis {along}" for i, along in axis.places)

    def _stays_fixed(self, axis: FreeAxis, error: Exception) -> None:
        reason, where = _in_words(error), self._of(axis)
        if not isinstance(self.wanted, str):
            i, along = axis.places[0]
            key, name = f"export.dynamic_axes.{self.names[i]}.{along}", self.wanted[self.names[i]][along]
            advice = "remove this axis from export.dynamic_axes"
            raise ConfigError(key, name, reason=f"its size is fixed at {axis.size}: {reason}; {advice}")
        if not isinstance(error, _HasWeightsError):
            self.notes.append((where, f"its size is fixed at {axis.size}: {reason}"))


def _in_words(error: Exception) -> str:
    if not isinstance(error, UntraceableError):
        return str(error)
    file, line = error.place
    inside = f"in module '{error.module}'" if error.module else ""
    where = " ".join(one for one in (inside, f"at {file.rpartition('/')[2]}:{line}" if file else "") if one)
    return f"{error.reason} ({where})" if where else error.reason


class _NotFreeError(Exception):
    """Raised if the model fails at other sizes of an axis, or if the graph computes something else there."""


class _HasWeightsError(_NotFreeError):
    """Raised for an axis of features, for which a layer has a fixed number of weights; no note is needed."""

    def __str__(self) -> str:
        return "a layer has weights only for this size"


def _of_weights(error: Exception) -> bool:
    """Returns whether an error was raised in a layer of torch.nn with weights."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    owners = (frame.f_locals.get("self") for frame in frames)
    return any(
        isinstance(owner, nn.Module)
        and type(owner).__module__.startswith("torch.nn")
        and any(True for _ in owner.parameters(recurse=False))
        for owner in owners
    )


def with_sizes(tensors: Sequence[Tensor], sizes: Mapping[Place, int]) -> tuple[Tensor, ...]:
    """Returns `tensors` with the given sizes along the given axes, by repeating or cutting off their values."""
    found = list(tensors)
    for (i, axis), size in sizes.items():
        found[i] = resized((found[i],), size, (axis,))[0]
    return tuple(found)
