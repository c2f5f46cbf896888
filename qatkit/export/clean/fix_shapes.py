"""Fixes the sizes of dynamic axes, which a user chooses by the name of a size, or by an input and an axis number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

from qatkit.export.clean.graphs import graphs, size_name, values
from qatkit_verify.errors import ConfigError, counted, did_you_mean

KEY = "clean.fix_shapes"
_PLACED = re.compile(r"(.+)\[(-?\d+)\]")
Place = tuple[str, int]  # an input and one of its axes


def fix_shapes(model: ir.Model, asked: Mapping[str, Any]) -> list[str]:
    """Fixes sizes in the inputs, and everywhere else where the file uses the same name for a size.

    Args:
        model: the model, changed in place.
        asked: numbers by the name of a size, or sizes by the name of an input ({input: {2: 224}}, {"input[2]": 224} or
            {input: [1, 3, 224, 224]}).

    Returns:
        Lines that say which sizes were fixed.

    Raises:
        ConfigError: a name is neither a size nor an input, an input lacks the axis, a list does not have one size per
            axis, a size is not an integer of at least 1, the file already has a different size there, or one size gets
            two values.
    """
    if not isinstance(asked, Mapping):
        raise ConfigError(KEY, asked, "sizes by name ({batch: 1}) or by input ({input: {2: 224}})")
    inputs = {str(value.name): value for value in model.graph.inputs}
    sizes = (size for value in inputs.values() for size in value.shape or ())
    symbols = {name for size in sizes if (name := size_name(size))}
    named: dict[str, int] = {}
    placed: dict[Place, int] = {}
    for key, given in ((str(key), given) for key, given in asked.items()):
        if key in symbols and not (key in inputs and not isinstance(given, int)):
            _name(named, key, _size(key, given), (key, given))
            continue
        for place, size in _places(key, given, inputs, symbols):
            found = _present(inputs, place, (key, given))
            if isinstance(found, int) and found != size:
                reason = f"axis {place[1]} of input '{place[0]}' has size {found} in the file, not {size}"
                raise ConfigError(f"{KEY}.{key}", given, reason=reason)
            placed[place] = size
            if symbol := size_name(found):
                _name(named, symbol, size, (key, given))
    return [*_fix_named(model, named), *_fix_placed(inputs, placed)]


def _name(named: dict[str, int], symbol: str, size: int, typed: tuple[str, Any]) -> None:
    """Adds the number for a named size, which must not have another one already."""
    if named.setdefault(symbol, size) != size:
        key, given = typed
        reason = f"the size '{symbol}' gets two values, {named[symbol]} and {size}; give one"
        raise ConfigError(f"{KEY}.{key}", given, reason=reason)


def _places(
    key: str, given: Any, inputs: Mapping[str, ir.Value], symbols: set[str]
) -> Iterator[tuple[Place, int]]:
    """Yields the axes that one entry of the setting names, with their sizes."""
    found = _PLACED.fullmatch(key)
    if key in inputs and isinstance(given, Mapping):
        for axis, size in given.items():
            yield (key, _axis(key, axis)), _size(f"{key}.{axis}", size)
    elif key in inputs and isinstance(given, (list, tuple)):
        rank = len(_axes(inputs[key], (key, given)))
        if len(given) != rank:
            allowed = f"a list of {counted(rank, 'size')}, one for each axis of the input"
            raise ConfigError(f"{KEY}.{key}", list(given), allowed)
        for axis, size in enumerate(given):
            yield (key, axis), _size(f"{key}[{axis}]", size)
    elif found and found[1] in inputs:
        yield (found[1], int(found[2])), _size(key, given)
    elif key in inputs:
        raise ConfigError(
            f"{KEY}.{key}", given, "sizes by axis ({2: 224}), or a list for all axes ([1, 3, 224, 224])"
        )
    else:
        known = [*sorted(symbols), *inputs]
        listed = f", only {', '.join(known)}" if known else ""
        reason = f"the file has no size and no input of this name{listed}{did_you_mean(key, known)}"
        raise ConfigError(f"{KEY}.{key}", given, reason=reason)


def _axis(key: str, axis: Any) -> int:
    try:
        return int(axis)
    except (TypeError, ValueError):
        raise ConfigError(f"{KEY}.{key}", axis, "the number of an axis, starting at 0") from None


def _size(key: str, size: Any) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"{KEY}.{key}", size, "an integer of at least 1")
    return size


def _present(inputs: Mapping[str, ir.Value], place: Place, typed: tuple[str, Any]) -> int | ir.SymbolicDim:
    """Returns the size that an input has at an axis."""
    name, axis = place
    shape = _axes(inputs[name], typed)
    if not 0 <= axis < len(shape):
        known = "axis 0" if len(shape) == 1 else f"axes 0 to {len(shape) - 1}"
        reason = f"input '{name}' has no axis {axis}, only {known}"
        raise ConfigError(f"{KEY}.{typed[0]}", typed[1], reason=reason)
    return shape[axis]


def _axes(value: ir.Value, typed: tuple[str, Any]) -> ir.Shape:
    if not value.shape:
        reason = f"the file records no axes for input '{value.name}'; leave it out of {KEY}"
        raise ConfigError(f"{KEY}.{typed[0]}", typed[1], reason=reason)
    return value.shape


def _fix_named(model: ir.Model, named: Mapping[str, int]) -> list[str]:
    """Replaces names of sizes by numbers throughout the file."""
    counts = dict.fromkeys(named, 0)
    for graph in graphs(model.graph):
        for value in values(graph):
            shape = value.shape
            for axis, size in enumerate(shape or ()):
                name = size_name(size)
                if shape is not None and name is not None and name in named:
                    value.shape = shape = _with(shape, axis, named[name])
                    counts[name] += 1
    return [f"{name} = {size} ({counted(counts[name], 'place')} changed)" for name, size in named.items()]


def _fix_placed(inputs: Mapping[str, ir.Value], placed: Mapping[Place, int]) -> list[str]:
    lines = []
    for (name, axis), size in placed.items():
        shape = inputs[name].shape
        if shape is not None and not isinstance(shape[axis], int):
            inputs[name].shape = _with(shape, axis, size)
            lines.append(f"{name}[{axis}] = {size}")
    return lines


def _with(shape: ir.Shape, axis: int, size: int) -> ir.Shape:
    return ir.Shape([size if i == axis else one for i, one in enumerate(shape)])
