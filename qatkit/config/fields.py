"""The declaration of a setting: its default, its meaning with the unit, and its allowed values, all in one place.

    @dataclass
    class ExportConfig:
        opset: int = setting(13, "opset of the ONNX file", Range(13, 23))

Code that checks a value, in a whole configuration or at a function's own boundary, asks the field:

    limit_of(ExportConfig, "opset").check("export.opset", opset)

`--help` and docs/configuration.md are written from the same fields. The module handles plain
dataclasses, and imports neither Hydra nor torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qatkit.quant.granularity import BLOCK_SIZES, BLOCKS, GRANULARITIES, PerChannel, granularity_of
from qatkit_verify.errors import ConfigError
from qatkit_verify.installed import TWO_BITS

DOC, LIMIT = "doc", "limit"
_LARGEST = 2**31 - 1  # the libraries in use store counts in 32 bits
# Linux allows 255 and 4,096 bytes. Temporary files have longer names than the final ones.
_NAME_BYTES, _PATH_BYTES = 240, 4000


class Limit:
    """The allowed values of a setting. `str` returns a short form for tables."""

    def holds(self, value: Any) -> bool:
        """Returns whether `value`, which has the setting's type, is allowed."""
        raise NotImplementedError

    def check(self, key: str, value: Any, *, or_null: bool = False) -> None:
        """Raises ConfigError for a value that is not allowed.

        Args:
            key: the key as it is typed.
            value: the value, which has the setting's type.
            or_null: whether the message says that null is allowed too.
        """
        if not self.holds(value):
            null = ", or null" if or_null else ""
            raise ConfigError(key, value, f"{self.expected()}{null}{self.hint(value)}")

    def expected(self) -> str:
        """Returns the allowed values as a noun phrase that continues a message after "expected"."""
        return str(self)

    def hint(self, value: Any) -> str:
        """Returns a suggestion of what may have been meant, for the end of the message."""
        return ""


@dataclass(frozen=True)
class Range(Limit):
    """A limit to an interval of finite numbers. Without an upper end, it ends at the largest 32-bit integer.

    Args:
        low: the lower end.
        high: the upper end.
        above: whether the lower end is excluded.
        all_of_them: whether -1, which means all, is allowed too.
        whole: whether messages ask for an integer; `field_limit` sets it by the annotation of the field.
    """

    low: float
    high: float = math.inf
    above: bool = False
    all_of_them: bool = False
    whole: bool = field(default=False, compare=False)

    def holds(self, value: float) -> bool:
        """Returns whether `value` is a finite number inside the interval, or -1 if that is allowed."""
        inside = value > self.low if self.above else value >= self.low
        return (inside and value <= min(self.high, _LARGEST)) or (self.all_of_them and value == -1)

    def hint(self, value: float) -> str:
        """Returns the implicit upper end if it is exceeded, else ""."""
        return f"; the maximum is {_LARGEST}" if value > _LARGEST and math.isinf(self.high) else ""

    def expected(self) -> str:
        """Returns the interval as text, such as "an integer from 1 to 8"."""
        kind, low = "an integer" if self.whole else "a number", _number(self.low)
        if math.isinf(self.high):
            words = f"{kind} above {low}" if self.above else f"{kind} of at least {low}"
        else:
            high = _number(self.high)
            words = f"{kind} above {low}, up to {high}" if self.above else f"{kind} from {low} to {high}"
        return words + (", or -1 for all" if self.all_of_them else "")

    def __str__(self) -> str:
        return self._interval() + (", or -1 for all" if self.all_of_them else "")

    def _interval(self) -> str:
        low = f"above {_number(self.low)}" if self.above else _number(self.low)
        if math.isinf(self.high):
            return low if self.above else f"{low} or higher"
        return f"{low}{', up' if self.above else ''} to {_number(self.high)}"


def _number(value: float) -> str:
    """Returns a number as text; integers have all digits."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


@dataclass(frozen=True)
class Choices(Limit):
    """A limit to one word of a list."""

    values: tuple[str, ...]

    def holds(self, value: str) -> bool:
        """Returns whether `value` is one of the words."""
        return value in self.values

    def hint(self, value: str) -> str:
        """Returns the nearest allowed word as a suggestion; "" if none is similar."""
        near = difflib.get_close_matches(value, self.values, n=1)
        return f" (did you mean {near[0]}?)" if near else ""

    def expected(self) -> str:
        """Returns the words as a list."""
        return f"one of {', '.join(self.values)}"

    def __str__(self) -> str:
        return " | ".join(self.values)


@dataclass(frozen=True)
class Words(Limit):
    """A limit to a list of words, each from a list of allowed ones."""

    values: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        """Returns whether `value` is a list of allowed words."""
        return isinstance(value, list) and all(one in self.values for one in value)

    def hint(self, value: Any) -> str:
        """Returns the allowed word nearest to the first wrong one, as a suggestion; "" if none is similar."""
        wrong = (
            next((one for one in value if one not in self.values), "") if isinstance(value, list) else value
        )
        return Choices(self.values).hint(str(wrong))

    def expected(self) -> str:
        """Returns the words as a list."""
        return f"a list with any of {', '.join(self.values)}"

    def __str__(self) -> str:
        return f"[{', '.join(self.values)}]"


@dataclass(frozen=True)
class Listed(Limit):
    """A limit to one of several numbers or words.

    Attributes:
        values: the allowed values.
        because: the reason why others are not allowed, as the end of the message.
    """

    values: tuple[int | str, ...]
    because: str = ""

    def holds(self, value: Any) -> bool:
        """Returns whether `value` is one of the allowed values."""
        return value in self.values

    def expected(self) -> str:
        """Returns the values as a list."""
        return f"one of {', '.join(map(str, self.values))}{self.because}"

    def __str__(self) -> str:
        return " | ".join(map(str, self.values))


@dataclass(frozen=True)
class Switch(Limit):
    """A limit to true, false or "auto"."""

    def holds(self, value: Any) -> bool:
        """Returns whether `value` is true, false or "auto"."""
        return value == "auto" or isinstance(value, bool)

    def expected(self) -> str:
        """Returns the three values as a list."""
        return "one of auto, true, false"

    def __str__(self) -> str:
        return "auto | true | false"


@dataclass(frozen=True)
class Place(Limit):
    """A limit to valid paths, which a file system and a YAML file can store; the path need not exist."""

    def holds(self, value: str) -> bool:
        """Returns whether a path is printable and not blank, and neither it nor a name in it is too long."""
        try:
            sizes = [len(name.encode()) for name in value.split("/")]
        except UnicodeEncodeError:  # bytes that are not UTF-8
            return False
        plain = all(one.isprintable() for one in value)
        return (
            bool(value.strip())
            and plain
            and max(sizes) <= _NAME_BYTES
            and sum(sizes) + len(sizes) <= _PATH_BYTES
        )

    def expected(self) -> str:
        """Returns what a path may contain."""
        return (
            f"a path without control characters, of at most {_PATH_BYTES} bytes, with "
            f"names of at most {_NAME_BYTES} bytes"
        )

    def __str__(self) -> str:
        return "a path"


@dataclass(frozen=True)
class Axes(Limit):
    """A limit to choices of dynamic axes: none, auto, or names by input and axis."""

    def holds(self, value: Any) -> bool:
        """Returns whether `value` is one of the words, or maps inputs to mappings from axes to names.

        At least one axis must have a name, and names are identifiers other than "batch".
        """
        if isinstance(value, str) or not isinstance(value, Mapping):
            return value in ("none", "auto")
        names = [name for axes in value.values() if isinstance(axes, Mapping) for name in axes.values()]
        places = [axis for axes in value.values() if isinstance(axes, Mapping) for axis in axes]
        return (
            bool(names)
            and all(isinstance(axes, Mapping) for axes in value.values())
            and all(type(axis) is int and axis >= 0 for axis in places)
            and all(isinstance(name, str) and name.isidentifier() and name != "batch" for name in names)
        )

    def expected(self) -> str:
        """Returns the three forms."""
        return "none, auto, or names by input and axis, such as {input: {2: height, 3: width}}"

    def __str__(self) -> str:
        return "none | auto | {input: {axis: name}}"


@dataclass(frozen=True)
class Scales(Limit):
    """A limit to granularities of weight scales: a word, or a block size."""

    def holds(self, value: Any) -> bool:
        """Returns whether `value` names a granularity."""
        try:
            granularity_of(value)
        except ValueError:
            return False
        return True

    def expected(self) -> str:
        """Returns the forms as a list."""
        return f"one of {', '.join((*GRANULARITIES, BLOCKS))}"

    def __str__(self) -> str:
        return " | ".join((*GRANULARITIES, BLOCKS))


FRACTION = Range(0, 1)
COUNT = Range(1, whole=True)
POSITIVE = Range(0, above=True)
PLACE, SWITCH, AXES, SCALES = Place(), Switch(), Axes(), Scales()
# Bit widths of weights that are multiplied by float activations.
_KERNELS = f" (ONNX Runtime's MatMulNBits has kernels for 4 and 8 bits, and for 2 from {TWO_BITS}; 3 are stored in 4)"
BITS, BLOCK = Listed((2, 3, 4, 8), _KERNELS), Listed((*BLOCK_SIZES, str(PerChannel(0))))


def setting(default: Any, doc: str, limit: Limit | None = None) -> Any:
    """Returns a dataclass field.

    Args:
        default: the default value, or a function that returns it (`dict`).
        doc: a phrase that says what the setting is, with its unit.
        limit: the allowed values within the type. Null is always allowed if the type allows it.
    """
    metadata = {DOC: doc, LIMIT: limit}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def limit_of(owner: type, name: str) -> Limit:
    """Returns the limit of the field `name` of a dataclass.

    Raises:
        KeyError: the field does not exist, or has no limit.
    """
    limit = field_limit(field_of(owner, name))
    if limit is None:
        raise KeyError(f"{owner.__name__}.{name} has no limit")
    return limit


def field_of(owner: type, name: str) -> dataclasses.Field[Any]:
    """Returns the field `name` of a dataclass."""
    return {one.name: one for one in dataclasses.fields(owner)}[name]


def field_limit(one: dataclasses.Field[Any]) -> Limit | None:
    """Returns the limit of a field. The field's annotation decides whether the numbers of a Range are integers."""
    limit: Limit | None = one.metadata.get(LIMIT)
    kind = str(one.type)
    if isinstance(limit, Range) and "int" in kind and "float" not in kind:
        return dataclasses.replace(limit, whole=True)
    return limit


def check_limits(settings: Any, prefix: str) -> None:
    """Checks every field of a dataclass and of its inner dataclasses; null means "not set" and is skipped.

    Args:
        settings: the instance of a dataclass.
        prefix: its key as it is typed, such as "export"; "" for the root.

    Raises:
        ConfigError: a value is not allowed; the first one is reported.
    """
    for key, value, limit, or_null in values_of(settings, prefix):
        if limit is not None and value is not None:
            limit.check(key, value, or_null=or_null)


def values_of(settings: Any, prefix: str) -> Iterator[tuple[str, Any, Limit | None, bool]]:
    """Yields (key, value, limit, whether null is allowed) for all fields of a dataclass.

    This includes the fields of inner dataclasses, and of dataclasses in mappings.
    """
    for one in dataclasses.fields(settings):
        key, value = f"{prefix}.{one.name}".lstrip("."), getattr(settings, one.name)
        entries = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {}
        for inner, group in {key: value, **entries}.items():
            if dataclasses.is_dataclass(group):
                yield from values_of(group, inner)
        yield key, value, field_limit(one), may_be_null(one)


def is_path(one: dataclasses.Field[Any]) -> bool:
    """Returns whether the value of a field is a path."""
    return isinstance(one.metadata.get(LIMIT), Place)


def may_be_null(one: dataclasses.Field[Any]) -> bool:
    """Returns whether null is allowed for a field.

    Only the text of the annotation is read, since a type in a user's annotation may not be importable here.
    """
    return any(word in str(one.type) for word in ("None", "Optional"))
