"""A register of files that few exporters write: each is a small graph, what it is fed, and what is expected of it."""

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
    """A file.

    Attributes:
        outputs: names, in order.
        feeds: by the names of inputs.
        inputs: their types and shapes in the file; those of `feeds`, with a first axis of any size, where not given.
        fixed: inputs that become constants.
        pairs: values that are quantized, at least.
        steps: how far the file may be from its module, as `same` counts: with int8 kernels of functions several.
        least: dB of the INT8 file's outputs against the float file's.
        inlined: whether the file has nodes that the written one has others for: functions, fused operators.
        opset, imports, more: of the model, as `save` takes them.
        edit: changes the model that is saved.
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
    """Registers a graph under what is unusual about it."""

    def registered(build: Build) -> Build:
        assert title not in FILES
        FILES[title] = build
        return build

    return registered


def written_down(build: Build, folder: Path) -> tuple[Path, Unusual]:
    """The file of a graph, and the graph."""
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
    """The operators that ONNX Runtime adds to the standard."""
    return [helper.make_opsetid(MICROSOFT, 1)]


def ints(*values: int) -> Array:
    """A vector of int64."""
    return np.array(values, np.int64)


def linear(net: Net, x: str, inputs: int, outputs: int) -> str:
    """A MatMul with a constant matrix."""
    return net.add("MatMul", x, net.constant(floats(inputs, outputs)))
