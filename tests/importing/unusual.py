"""Registry of files that few exporters write: small graphs with their inputs and the expected results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx_models import Array, onnx_type, save
from small_nets import Net, floats

MICROSOFT = "com.microsoft"


@dataclass
class Unusual:
    """A file with its inputs and the expected result.

    Attributes:
        outputs: names of the outputs, in order.
        feeds: values by input name.
        inputs: types and shapes of the inputs; by default those of `feeds` with a dynamic first axis.
        fixed: values of inputs that become constants, by name.
        pairs: minimum number of quantized values.
        steps: tolerance between the file and its module as in `same`; larger if int8 kernels are less exact.
        least: minimum SQNR in dB of the INT8 file's outputs against the float file's.
        inlined: whether the written file replaces functions or fused operators by other nodes.
        opset, imports, more: arguments for `save`.
        edit: changes the saved model.
    """

    outputs: Sequence[str]
    feeds: Mapping[str, Array] = field(default_factory=lambda: {"x": 3 * floats(2, 3, 8, 8)})
    inputs: Mapping[str, tuple[int, Sequence[Any]]] | None = None
    fixed: Mapping[str, Any] | None = None
    pairs: int = 1
    steps: float = 1.0
    least: float = 15.0
    inlined: bool = False
    opset: int = 17
    imports: Sequence[onnx.OperatorSetIdProto] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[onnx.ModelProto], None] | None = None


Build = Callable[[Net], Unusual]
FILES: dict[str, Build] = {}


def file(title: str) -> Callable[[Build], Build]:
    """Registers a graph under a title that says what is unusual about it."""

    def registered(build: Build) -> Build:
        assert title not in FILES
        FILES[title] = build
        return build

    return registered


def written_down(build: Build, folder: Path) -> tuple[Path, Unusual]:
    """Writes the file of a graph and returns its path and what is expected of it."""
    net = Net()
    made = build(net)
    inputs = made.inputs or {
        name: (onnx_type(value), ["n", *value.shape[1:]] if value.ndim else [])
        for name, value in made.feeds.items()
    }
    path = save(
        folder / "float.onnx", net.nodes, inputs, made.outputs, net.constants, opset=made.opset,
        imports=made.imports, **made.more,
    )  # fmt: skip
    if made.edit is not None:
        model = onnx.load(str(path))
        made.edit(model)
        onnx.save(model, str(path))
    return path, made


def of_microsoft() -> list[onnx.OperatorSetIdProto]:
    """Returns the opset import for the operators that ONNX Runtime adds to the standard."""
    return [helper.make_opsetid(MICROSOFT, 1)]


def ints(*values: int) -> Array:
    """Returns a vector of int64."""
    return np.array(values, np.int64)


def linear(net: Net, x: str, inputs: int, outputs: int) -> str:
    """Adds a MatMul with a constant matrix and returns its output."""
    return net.add("MatMul", x, net.constant(floats(inputs, outputs)))
