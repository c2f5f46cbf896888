"""Checks the states of a file: outputs that become inputs of the next step, set by `model.kwargs.states`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from qatkit_verify.errors import ConfigError, did_you_mean
from qatkit_verify.free_run import KEY


def file_states(file: Path, model: ir.Model, asked: Any, fixed: Collection[str]) -> dict[str, str]:
    """Returns the name of the output that becomes each state, by the name of the input, in the file's order.

    Args:
        file: the file, for messages.
        model: the model in the file.
        asked: the setting `model.kwargs.states`, {INPUT: OUTPUT}.
        fixed: the names of inputs that are constants.

    Raises:
        ConfigError: `asked` is empty or not a mapping, names a fixed input or something that the file does not have,
            uses an output twice, leaves no input for the data, or combines an input and an output of
            different types or shapes.
    """
    if not isinstance(asked, Mapping) or not asked:
        raise ConfigError(
            KEY, asked, "a mapping {INPUT: OUTPUT} of outputs that become inputs of the next step"
        )
    inputs = {str(value.name): value for value in model.graph.inputs}
    outputs = {str(value.name): value for value in model.graph.outputs}
    for name, output in asked.items():
        _check_name(f"{name}: {output}", name, inputs, f"an input of {file.name}")
        _check_name(f"{name}: {output}", output, outputs, f"an output of {file.name}")
        if name in fixed:
            told = f"model.kwargs.fix already sets the input '{name}'; remove the input from one of the two"
            raise ConfigError(KEY, f"{name}: {output}", reason=told)
        _check_alike(name, output, inputs[name], outputs[output])
    taken = list(asked.values())
    if twice := next((one for one in taken if taken.count(one) > 1), None):
        named = ", ".join(f"'{name}'" for name, output in asked.items() if output == twice)
        told = f"several inputs ({named}) get the output '{twice}'; name a different output for each"
        raise ConfigError(KEY, _text(asked), reason=told)
    if not inputs.keys() - {*asked, *fixed}:
        told = f"every input of {file.name} is a state or fixed; leave at least one for the data"
        raise ConfigError(KEY, _text(asked), reason=told)
    return {name: str(asked[name]) for name in inputs if name in asked}


def _check_name(given: str, name: object, known: Mapping[str, object], what: str) -> None:
    if name not in known:
        raise ConfigError(KEY, given, f"{what}; there is no '{name}'{did_you_mean(str(name), known)}")


def _check_alike(name: str, output: str, given: ir.Value, found: ir.Value) -> None:
    """Checks that an input and an output have the same type and shape, as far as these are known."""
    told = f"the input '{name}' is {_described(given)}, but the output '{output}' is {_described(found)}"
    types = {one.dtype for one in (given, found) if one.dtype is not None}
    alike = given.shape is None or found.shape is None or _fits(list(given.shape), list(found.shape))
    if len(types) > 1 or not alike:
        raise ConfigError(
            KEY, f"{name}: {output}", reason=f"{told}; a state needs the same type and shape in both"
        )


def _fits(a: Sequence[Any], b: Sequence[Any]) -> bool:
    pairs = zip(a, b, strict=False)
    sizes = [(x, y) for x, y in pairs if isinstance(x, int) and isinstance(y, int)]
    return len(a) == len(b) and all(
        x == y or min(x, y) < 1 for x, y in sizes
    )  # some exporters write a dynamic size as -1 or 0


def _described(value: ir.Value) -> str:
    kind = "of an unknown type" if value.dtype is None else str(value.dtype.numpy())
    if value.shape is None:
        return kind
    sizes = ", ".join(
        str(size) if isinstance(size, int) else str(size.value or "any") for size in value.shape
    )
    return f"{kind} [{sizes}]"


def _text(asked: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name}: {output}" for name, output in asked.items())
