"""Decomposes operators without 8-bit kernels into operators that have such kernels.

    com.microsoft.FusedConv                   Conv, Add of its fourth input, activation
    com.microsoft.FusedGemm                   Gemm, activation
    com.microsoft.FusedMatMul (*)             MatMul (the matrix transposed if requested), Mul by alpha
    Einsum "...c,cm->...m" (*)                MatMul

    (*) with a constant matrix as the second input; for FusedMatMul, also without a transposed first input

ONNX Runtime's optimizer writes the first three. If the parts stay float, it fuses them again when it loads the file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

_DOMAIN = "com.microsoft"
_CLIP_BY_INPUTS = 11  # the first opset with the bounds of Clip as inputs
# Attributes of an activation in the order of `activation_params` of FusedConv.
_NUMBERS = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Clip": ("min", "max")}
_PREFIX = "activation_"
_PRODUCT = re.compile(r"(?P<rows>[A-Za-z.]*)(?P<c>[A-Za-z]),(?P=c)(?P<m>[A-Za-z])->(?P=rows)(?P=m)")


def take_apart(model: ir.Model) -> None:
    """Replaces every fused operator of a model by its parts; the last part takes over the name of the output."""
    found = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _is_fused(node)]
    if not found:
        return
    values = [
        v for node in ir.traversal.RecursiveGraphIterator(model.graph) for v in (*node.inputs, *node.outputs)
    ]
    names = {str(value.name) for value in (*values, *model.graph.inputs) if value is not None}
    opset = model.opset_imports.setdefault("", _CLIP_BY_INPUTS)
    for node in found:
        _Parts(node, opset, names).replace()


def _is_fused(node: ir.Node) -> bool:
    if node.domain == _DOMAIN and node.op_type in ("FusedConv", "FusedGemm"):
        return True
    if len(node.inputs) < 2 or not _is_matrix(node.inputs[1]):
        return False
    if node.domain == _DOMAIN and node.op_type == "FusedMatMul":
        return not any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    return node.domain == "" and node.op_type == "Einsum" and _PRODUCT.fullmatch(equation) is not None


def _is_matrix(value: ir.Value | None) -> bool:
    held = None if value is None else value.const_value
    return held is not None and len(held.shape) == 2


class _Parts:
    """The parts of a fused operator."""

    def __init__(self, node: ir.Node, opset: int, names: set[str]) -> None:
        assert isinstance(node.graph, ir.Graph)
        self.graph, self.node, self.opset, self.names = node.graph, node, opset, names
        self.kind = node.attributes.get_string("activation", "")

    def replace(self) -> None:
        node = self.node
        parts = self._product() if node.op_type in ("FusedMatMul", "Einsum") else self._layer()
        old, last = node.outputs[0], parts[-1].outputs[0]
        for part in parts[:-1]:
            part.outputs[0].name = self._name(part.op_type)
        self.graph.insert_before(node, parts)
        name, last.shape, last.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, last, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)
        last.name = name

    def _layer(self) -> list[ir.Node]:
        node, kind = self.node, self.node.op_type.removeprefix("Fused")
        inputs = list(node.inputs)
        added = inputs[3] if kind == "Conv" and len(inputs) > 3 else None
        own = [item for name, item in node.attributes.items() if not name.startswith("activation")]
        parts = [ir.Node("", kind, inputs[:3], own, name=node.name, num_outputs=1)]
        if added is not None:
            parts.append(self._behind(parts[-1], "Add", [added]))
        if self.kind:
            parts.append(self._activation(parts[-1]))
        return parts

    def _product(self) -> list[ir.Node]:
        node, parts = self.node, list[ir.Node]()
        x, matrix = node.inputs
        if node.attributes.get_int("transB", 0):
            turn = [ir.AttrInt64s("perm", [1, 0])]
            parts.append(
                ir.Node("", "Transpose", [matrix], turn, name=f"{node.name}_Transpose", num_outputs=1)
            )
            matrix = parts[0].outputs[0]
        parts.append(ir.Node("", "MatMul", [x, matrix], name=node.name, num_outputs=1))
        alpha = node.attributes.get_float("alpha", 1.0)
        return (
            parts
            if alpha == 1.0
            else [*parts, self._behind(parts[-1], "Mul", [self._constant("alpha", alpha)])]
        )

    def _behind(
        self, before: ir.Node, kind: str, more: Sequence[ir.Value | None], items: Sequence[ir.Attr] = ()
    ) -> ir.Node:
        name = f"{self.node.name}_{kind}" if self.node.name else ""
        return ir.Node("", kind, [before.outputs[0], *more], list(items), name=name, num_outputs=1)

    def _activation(self, before: ir.Node) -> ir.Node:
        numbers = self._numbers()
        if self.kind == "Clip" and self.opset >= _CLIP_BY_INPUTS:
            bounds = [
                self._constant(name, numbers[name]) if name in numbers else None for name in ("min", "max")
            ]
            return self._behind(before, "Clip", bounds)
        return self._behind(before, self.kind, [], [ir.AttrFloat32(k, v) for k, v in numbers.items()])

    def _numbers(self) -> dict[str, float]:
        """Returns the parameters of the activation by the attribute names of its own operator."""
        params = self.node.attributes.get_floats("activation_params", ())
        if params:
            return dict(zip(_NUMBERS.get(self.kind, ()), params, strict=False))
        return {
            name.removeprefix(_PREFIX): item.as_float()
            for name, item in self.node.attributes.items()
            if name.startswith(_PREFIX) and item.type == ir.AttributeType.FLOAT
        }

    def _name(self, what: str) -> str:
        """Returns a name that is not used in the model."""
        base = f"{self.node.outputs[0].name}_{what}"
        free = next(n for i in itertools.count() if (n := f"{base}_{i}" if i else base) not in self.names)
        self.names.add(free)
        return free

    def _constant(self, name: str, value: float) -> ir.Value:
        name = self._name(name)
        tensor = ir.tensor(np.float32(value), name=name)
        made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(()), const_value=tensor)
        self.graph.register_initializer(made)
        return made
