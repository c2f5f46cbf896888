"""Random samples for a model whose inputs are known, if there are no data.

    type, shape, range of each input ── seed, split, number of the sample ──> arrays by the names of the inputs

A file that is calibrated with them has its final size and speed. But its ranges do not fit real data, and no
accuracy figure is meaningful. The report, the final table and the bundle's manifest say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qatkit.config.schema import DataConfig
from qatkit.data.arrays import Port
from qatkit.data.loading import seed_of
from qatkit.data.request import Request
from qatkit.data.sources import Splits
from qatkit.tasks.base import NO_TARGET
from qatkit_verify.errors import ConfigError, as_typed, counted, did_you_mean

NOTE = (
    "the data were drawn at random (data=drawn), so the ranges do not fit real data and no figure of accuracy or "
    "agreement applies to it; calibrate and verify with real samples (data=arrays, data=audio or data=pictures) before "
    "you use the file"
)
_COUNT = 64  # default number of samples of a split
_STEPS = 32  # number of steps of a sequence, for a model with states
# Default sizes of dynamic axes: the side of a picture, the number of samples of a wave, and any other size.
_PIXELS, _SECOND, _OTHER = 224, 16000, 64
_SIZES_FORM = "{AXIS: SIZE}, {INPUT: SIZE} or {INPUT: [SIZE, ...]}"
_RANGES_FORM = "{INPUT: [LOW, HIGH]}"


@dataclass(frozen=True)
class Draw:
    """The distribution of an input's random values.

    Attributes:
        name: name of the input.
        dtype: name of the input's type in NumPy.
        shape: shape of a sample, with the batch axis.
        span: both ends of the range, inclusive; None for the standard normal distribution.
        whole: whether the values are integers.
        constant: whether all samples have the same values, as for an input without a batch axis if other
            inputs have one.
        because: the reason for the range, for `text`; "" if it needs no explanation.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: tuple[float, float] | None
    whole: bool
    constant: bool
    because: str

    def array(self, *parts: object) -> NDArray[Any]:
        """Returns the values of a sample, seeded by `parts`; a constant input uses only the first part."""
        draw = np.random.default_rng(seed_of("drawn", self.name, *(parts[:1] if self.constant else parts)))
        if self.span is None:
            made: NDArray[Any] = draw.standard_normal(self.shape)
        elif self.whole:
            low, high = (int(one) for one in self.span)
            made = draw.integers(
                low, high, self.shape, np.uint64 if high >= 2**63 else np.int64, endpoint=True
            )
        else:
            made = draw.uniform(*self.span, self.shape)
        return np.asarray(made).astype(np.float32 if np.dtype(self.dtype).kind == "f" else self.dtype)

    @property
    def text(self) -> str:
        """A description of the input: its name, type, shape and range."""
        told = "normal(0, 1)" if self.span is None else f"{self.span[0]:.15g}..{self.span[1]:.15g}"
        because = f" ({self.because})" if self.because else ""
        return f"{self.name} {self.dtype} {list(self.shape)} {told}{because}"


class DrawnArrays:
    """A dataset of random samples; an item is (arrays by name, target).

    Args:
        draws: the distributions of the inputs.
        count: number of samples.
        parts: the seed and the name of the split, from which the samples are drawn.

    Attributes:
        lengths: number of samples of each sequence, for models with states.
        targets: `NO_TARGET` for each sample.
    """

    def __init__(self, draws: Sequence[Draw], count: int, *parts: object) -> None:
        self.draws, self.parts = draws, parts
        self.lengths = [min(_STEPS, count - start) for start in range(0, count, _STEPS)]
        self.targets = [NO_TARGET] * count

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[dict[str, NDArray[Any]], int]:
        return {one.name: one.array(*self.parts, index) for one in self.draws}, NO_TARGET


def drawn(root: str | None, download: bool, seed: int, request: Request | None = None) -> Splits:
    """Returns samples drawn for the inputs of a model, `data.count` in each split.

    Raises:
        ConfigError: a folder is given, the model does not declare its inputs, an input has a type that cannot be
            drawn, or settings do not fit the inputs.
    """
    asked = request if request is not None else Request(DataConfig())
    settings = asked.settings
    if root is not None:
        raise ConfigError("data.root", root, "null with data=drawn, which reads no files")
    ports = asked.inputs
    if not ports:
        told = (
            "the model does not declare its inputs; use an ONNX file, which does (recipe=onnx_ptq onnx=FILE)"
        )
        raise ConfigError("data.source", settings.source, reason=told)
    _check_names("ranges", settings.ranges, {port.name for port in ports}, _RANGES_FORM)
    sizes = _Sizes(ports, settings.sizes)
    batched = any(port.axis is not None for port in ports)
    draws = [_draw(port, sizes, settings, constant=batched and port.axis is None) for port in ports]
    count = settings.count or _COUNT
    train, test = (DrawnArrays(draws, count, seed, part) for part in ("train", "test"))
    told = f"samples drawn for each split: {count}, with {'; '.join(one.text for one in draws)}"
    return Splits(train, test, (), notes=(NOTE, told), arrays=True, drawn=True, advice=sizes.advice)


def _draw(port: Port, sizes: _Sizes, settings: DataConfig, *, constant: bool) -> Draw:
    kind = np.dtype(port.dtype)
    if kind.kind not in "fiub":
        told = f"the input '{port.name}' is {port.dtype}, which cannot be drawn; fix it with model.kwargs.fix"
        raise ConfigError("data.source", settings.source, reason=told)
    asked = (settings.ranges or {}).get(port.name)
    whole, because = kind.kind != "f" or port.below is not None, "data.ranges"
    span: tuple[float, float] | None
    if asked is not None:
        span = _span(port, asked)
        whole = kind.kind != "f"
    elif port.below is not None:
        span, because = (0, port.below - 1), "rows of the table that it indexes"
    elif kind.kind == "f":
        span, because = None, ""
    elif kind.kind != "b" and kind.itemsize == 1:
        span, because = (int(np.iinfo(kind).min), int(np.iinfo(kind).max)), ""
    else:
        span, because = (0, 1), "" if kind.kind == "b" else "assumed; data.ranges sets it"
    return Draw(port.name, port.dtype, sizes.of(port), span, whole, constant, because)


def _span(port: Port, asked: Any) -> tuple[float, float]:
    """Returns the ends of the range that the configuration sets for an input.

    Raises:
        ConfigError: the ends are not two finite numbers in ascending order or, for an input that is not
            floating-point, are not integers within the range of its type.
    """
    kind = np.dtype(port.dtype)
    numbers = isinstance(asked, list | tuple) and all(isinstance(one, int | float) for one in asked)
    if not numbers or len(asked) != 2 or not asked[0] <= asked[1] or not np.isfinite(asked).all():
        raise ConfigError(
            f"data.ranges.{port.name}", asked, "two finite numbers [LOW, HIGH] in ascending order"
        )
    if kind.kind != "f":
        low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
        if any(one != int(one) for one in asked) or asked[0] < low or asked[1] > high:
            allowed = f"two integers from {low} to {high} for an input of type {port.dtype}"
            raise ConfigError(f"data.ranges.{port.name}", asked, allowed)
    return asked[0], asked[1]


class _Sizes:
    """The sizes of dynamic axes; axes with the same name have the same size by default.

    Attributes:
        assumed: the sizes of each input with a size that no setting gives, as `data.sizes` would list them.

    Raises:
        ConfigError: `data.sizes` is not a mapping, or has an unknown name or a size that is not a positive
            integer.
    """

    def __init__(self, ports: Sequence[Port], asked: Any) -> None:
        axes = {name for port in ports for axis, name in enumerate(port.names) if axis != port.axis} - {""}
        _check_names("sizes", asked, axes | {port.name for port in ports}, _SIZES_FORM)
        self.asked: Mapping[str, Any] = asked or {}
        self.by_name: dict[str, int] = {}
        self.assumed: dict[str, list[int]] = {}
        for name, value in self.asked.items():
            listed = value if isinstance(value, list | tuple) else [value]
            if not listed or not all(type(one) is int and one > 0 for one in listed):
                raise ConfigError(
                    f"data.sizes.{name}", value, "a positive integer, or a list of them for an input"
                )

    def of(self, port: Port) -> tuple[int, ...]:
        """Returns the shape of a sample of an input.

        Raises:
            ConfigError: `data.sizes` lists another number of sizes for the input than it has dynamic axes
                besides the batch, or lists several sizes for an axis name.
        """
        places = [axis for axis, size in enumerate(port.shape) if size is None and axis != port.axis]
        listed = self.asked.get(port.name)
        given = listed if isinstance(listed, list | tuple) else [listed] * len(places)
        if len(given) != len(places):
            axes = f"dynamic axis of the input '{port.name}' except the batch"
            allowed = (
                f"a list of {counted(len(places), 'size')}, one per {axes}"
                if places
                else f"no sizes, since no {axes} exists"
            )
            raise ConfigError(f"data.sizes.{port.name}", listed, allowed)
        found = [1 if size is None else size for size in port.shape]
        if port.axis is not None:
            found[port.axis] = 1
        for axis, size in zip(places, given, strict=True):
            known = self._given(port, axis, size)
            found[axis] = known or self._assumed(port, axis, places)
            if known is None:
                self.assumed[port.name] = [found[one] for one in places]
        return tuple(found)

    @property
    def advice(self) -> str:
        """The end of a message about a model that fails on the samples; "" if settings give all sizes."""
        listed = {name: one if len(one) > 1 else one[0] for name, one in self.assumed.items()}
        known = f"data.sizes={as_typed(listed)} was assumed"
        return f"; {known}, so set data.sizes to sizes that the model accepts" if listed else ""

    def _given(self, port: Port, axis: int, of_input: int | None) -> int | None:
        """Returns the size that is set for the name of an axis, else that set for the input, else None."""
        name = port.names[axis] if port.names else ""
        named = self.asked.get(name) if name else None
        if named is not None and name != port.name:
            if not isinstance(named, int):
                raise ConfigError(f"data.sizes.{name}", named, "a positive integer as the size of an axis")
            return named
        return of_input

    def _assumed(self, port: Port, axis: int, places: Sequence[int]) -> int:
        """Returns the default that another axis with the same name already has, else the default of this axis."""
        name = port.names[axis] if port.names else ""
        size = self.by_name.get(name) or _default(port, places)
        if name:
            self.by_name[name] = size
        return size


def _default(port: Port, places: Sequence[int]) -> int:
    """Returns the default size of a dynamic axis, guessed from the type and the shape of its input."""
    others = [size for axis, size in enumerate(port.shape) if axis not in places and axis != port.axis]
    if len(port.shape) >= 4:
        return _PIXELS
    wave = np.dtype(port.dtype).kind == "f" and len(places) == 1 and all(size == 1 for size in others)
    return _SECOND if wave else _OTHER


def _check_names(key: str, asked: Any, known: set[str], form: str) -> None:
    """Raises ConfigError if the setting is not a mapping or has a name that is unknown to the model."""
    if asked is None:
        return
    if not isinstance(asked, Mapping):
        raise ConfigError(f"data.{key}", asked, form)
    for name in asked:
        if name not in known:
            what = "input" if key == "ranges" else "input or dynamic axis"
            reason = f"the model has no such {what}{did_you_mean(str(name), known)}"
            raise ConfigError(f"data.{key}.{name}", asked[name], reason=reason)
