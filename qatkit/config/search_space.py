"""The search space: which configuration keys are searched, and over which values.

    schedule.lr: {low: 1e-4, high: 3e-2, log: true}      a number, uniform on a logarithmic scale
    schedule.epochs: {low: 1, high: 8, step: 1}          an integer, as the key is one
    calibration: [minmax, mse, percentile]               one of these; a group's options work like values of a
        key
    search.space.schedule.lr.high=1e-2                   on the command line: changes one end of an interval that
        a YAML file has set

A proposed value becomes an override in the form in which a user would type it. Every key, group and value
that the command line accepts can be searched, except keys that a study sets itself and keys that would make
its trials incomparable.
"""

from __future__ import annotations

import json
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from qatkit.config.field_types import hint_of, type_name
from qatkit.config.quoting import quoted
from qatkit.config.schema import Config
from qatkit_verify.errors import ConfigError, as_typed, did_you_mean

Value = float | int | bool | str | None
_NUMBER = {"low", "high", "step", "log"}
# Keys that a study sets itself, and keys that would make its trials incomparable.
_OWN = ("search", "output_dir", "resume", "name", "launcher", "hydra", "checkpoint", "onnx", "mode", "rescue")
# Keys that would change the figures by which trials are compared.
_ALIKE = ("seed", "verify.validation", "verify.held_out", "data.train_images")
_REALS = 2**53
_MOST = 1000  # limit of values per key, since each is checked before the first run


@dataclass(frozen=True)
class Numbers:
    """A closed interval of numbers.

    Attributes:
        key: the key that is searched.
        low, high: the ends of the interval, which belong to it.
        step: the distance between neighbouring values; None for every number, or every integer, in the interval.
        log: whether values are uniform on a logarithmic scale.
    """

    key: str
    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def whole(self) -> bool:
        """Returns whether the numbers are integers."""
        return all(
            isinstance(one, int) for one in (self.low, self.high, 1 if self.step is None else self.step)
        )

    @property
    def tried(self) -> list[Value]:
        """The values with which the key is tested before the search: both ends."""
        return [self.low, self.high]

    @property
    def count(self) -> int:
        """The number of values; for an interval of reals, about the number of values that a float can distinguish."""
        step = 1 if self.whole and self.step is None else self.step
        return _REALS if step is None else round((self.high - self.low) / step) + 1

    def at(self, index: int) -> Value:
        """Returns the value at an index from 0; reals on a logarithmic scale have equal ratios, not distances."""
        if self.whole:
            return int(self.low) + index * int(self.step or 1)
        share = index / (self.count - 1)
        if self.log:
            return max(self.low, min(math.pow(self.low, 1 - share) * math.pow(self.high, share), self.high))
        return min(self.low + share * (self.high - self.low), self.high)

    def place(self, value: Any) -> float:
        """Returns a number that identifies a value: the value itself, or with a step its index.

        With a step, values that are nearly equal (0.3 and 0.30000000000000004) have the same index.
        """
        return float(value) if self.step is None else round((value - self.low) / self.step)


@dataclass(frozen=True)
class Options:
    """An axis of listed values, which need not be numbers."""

    key: str
    values: tuple[Value, ...]

    @property
    def tried(self) -> list[Value]:
        """The values with which the key is tested before the search: all of them."""
        return list(self.values)

    @property
    def count(self) -> int:
        """The number of values."""
        return len(self.values)

    def at(self, index: int) -> Value:
        """Returns the value at an index from 0."""
        return self.values[index]

    def place(self, value: Any) -> float:
        """Returns the index of a value."""
        return self.values.index(value)


Axis = Numbers | Options


def hint_in_schema(key: str) -> Any:
    """Returns the type of a setting, or Any if the schema does not declare it."""
    return hint_of(Config, key)


def flat(space: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries by their full keys, from nested or dotted keys.

    `search.space.schedule.lr.high=1e-2` on the command line is a mapping within a mapping, and changes the
    entry `schedule.lr` of a YAML file.
    """
    groups = {key: entry for key, entry in space.items() if isinstance(entry, Mapping) and entry}
    groups = {key: entry for key, entry in groups.items() if _NUMBER.isdisjoint(entry)}
    whole = {key: entry for key, entry in space.items() if key not in groups}
    for key, entry in groups.items():
        for rest, value in flat(entry).items():
            name = f"{key}.{rest}"
            both = isinstance(value, Mapping) and isinstance(whole.get(name), Mapping)
            whole[name] = {**whole[name], **value} if both else value
    return whole


def axes(space: Mapping[str, Any], hint: Callable[[str], Any] = hint_in_schema) -> list[Axis]:
    """Returns the axes of `search.space`, sorted by key.

    Args:
        space: the entries of `search.space`.
        hint: a function that returns the type of a key, which decides whether its numbers are integers.
            If the type is Any, the numbers keep the type in which they are written.

    Raises:
        ConfigError: `space` is empty, or an entry does not describe an axis.
    """
    if not space:
        allowed = "at least one key, such as 'search.space={schedule.lr:{low:1e-4,high:1e-2},calibration:[minmax,mse]}'"
        raise ConfigError("search.space", "{}", allowed)
    return [_axis(key, space[key], hint) for key in sorted(space)]


def _axis(key: str, entry: Any, hint: Callable[[str], Any]) -> Axis:
    name = f"search.space.{key}"
    if key.split(".")[0] in _OWN or key in _ALIKE or any(one in key for one in "=+~@ "):
        raise ConfigError(name, entry, reason="this key cannot be searched; leave it out of search.space")
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        plain = all(one is None or isinstance(one, bool | str) or _is_number(one) for one in entry)
        if not plain or not 0 < len(entry) <= _MOST or len({_meant(one) for one in entry}) < len(entry):
            raise ConfigError(
                name, entry, f"1 to {_MOST} different values, each a number, a word, true, false or null"
            )
        return Options(key, tuple(entry))
    if not isinstance(entry, Mapping):
        raise ConfigError(name, entry, "[VALUE, ...] or {low: NUMBER, high: NUMBER, step: NUMBER, log: true}")
    return _of_type(_numbers(key, name, entry), hint(key), entry)


def _of_type(axis: Numbers, hint: Any, entry: Mapping[str, Any]) -> Numbers:
    """Returns the axis with its numbers converted to the key's type, since 0 and 1 may be typed for reals too."""
    kinds = typing.get_args(hint) or (hint,)
    if Any in kinds:
        return axis
    if float not in kinds and int not in kinds:
        told = "a group" if is_dataclass(hint) else f"of type {type_name(hint)}"
        raise ConfigError(
            f"search.space.{axis.key}", dict(entry), f"[VALUE, ...], since {axis.key} is {told}"
        )
    kind = float if float in kinds else int
    for part in ("low", "high", "step"):
        one = entry.get(part)
        if kind is int and one is not None and not float(one).is_integer():
            raise ConfigError(f"search.space.{axis.key}.{part}", one, f"an integer, like {axis.key}")
    step = None if axis.step is None else kind(axis.step)
    return replace(axis, low=kind(axis.low), high=kind(axis.high), step=step)


def _numbers(key: str, name: str, entry: Mapping[str, Any]) -> Numbers:
    if unknown := sorted(set(entry) - _NUMBER):
        reason = f"the key does not exist{did_you_mean(unknown[0], _NUMBER)}"
        raise ConfigError(f"{name}.{unknown[0]}", entry[unknown[0]], reason=reason)
    log = entry.get("log", False)
    if not isinstance(log, bool):
        raise ConfigError(f"{name}.log", log, "true or false")
    for part in ("low", "high", "step"):
        value = entry.get(part)
        missing = value is None and part != "step"
        if missing or (value is not None and not _is_number(value)):
            raise ConfigError(f"{name}.{part}", value, "a finite number")
    low, high, step = entry["low"], entry["high"], entry.get("step")
    if high <= low:
        raise ConfigError(f"{name}.high", high, f"a number above low={low}")
    if log and low <= 0:
        raise ConfigError(f"{name}.low", low, "a number above 0 with log: true")
    if step is not None and log:
        raise ConfigError(f"{name}.step", step, "null with log: true, which has no steps")
    if step is not None and not 0 < step <= high - low:
        allowed = f"a number above 0 and at most high - low = {high - low:g}"
        raise ConfigError(f"{name}.step", step, allowed)
    if step is not None and abs(round((high - low) / step) * step - (high - low)) > 1e-6 * step:
        count = int((high - low) / step)
        ends = f"{low + count * step:g} or {low + (count + 1) * step:g}"
        raise ConfigError(
            f"{name}.high", high, f"{ends}, a whole number of steps of {step:g} above low={low:g}"
        )
    return Numbers(key, low, high, step, log)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _meant(value: Value) -> Value:
    """Returns a value that is equal for options with the same meaning, such as true, 1 and "1.0".

    Optuna compares options with `==`, so they must differ by this value.
    """
    text = override("", value)[1:]
    try:
        return float(value if isinstance(value, bool) else text)
    except ValueError:
        return {"true": 1.0, "false": 0.0, "null": None}.get(text.lower(), text)


def override(key: str, value: Value) -> str:
    """Returns a proposed value as an override in the form in which it is typed."""
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    if isinstance(value, str) and re.fullmatch(r"""[^\["'{].*[=,:\s(){}\[\]].*""", value):
        return f"{key}={quoted(value)}"
    return f"{key}={value}"


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Returns the differences between two mappings as text; "" if there are none."""
    # Compared as they are written: 0 begins an interval of integers, 0.0 one of reals.
    keys = [key for key in {**there, **here} if _written(there.get(key)) != _written(here.get(key))]
    told = ([as_typed(one.get(key, "absent")) for one in (there, here)] for key in keys)
    return "; ".join(f"{key} is {old} there, {new} here" for key, (old, new) in zip(keys, told, strict=True))


def _written(entry: Any) -> str:
    return json.dumps(entry, sort_keys=True)
