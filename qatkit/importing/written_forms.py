"""Replaces nodes of the file with the operators that `qatkit.export` writes for their regions.

    HardSigmoid in 8 bits               Add(x, 3), quantized with scale 6/255, dequantized with 1/255
    HardSwish in 8 bits                 the same, and a Mul
    SiLU after a pair, before opset 24  com.microsoft.QuickGelu, with a function of standard operators
    ConvTranspose with integer weights  Conv, DepthToSpace (or Reshape and Transpose), Slice
    ReduceMean of images in 8 bits      GlobalAveragePool (and Flatten)

ONNX Runtime computes HardSwish and HardSigmoid in int8 only if they are written in this way, and has no int8 kernel for
ConvTranspose and ReduceMean. It would give each part of a SiLU its own DequantizeLinear, and would then not fuse
the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from torch import fx
from torch.nn import functional as F

from qatkit.export.ort_fusions import silu_function
from qatkit.export.rewrite import MICROSOFT
from qatkit.graph.convert.integer_modules import (
    Quantized,
    QuantizedHardSigmoid,
    QuantizedMul,
)
from qatkit.graph.convert.weight_only_modules import WeightOnly
from qatkit.graph.nodes import called, module_of, op_class
from qatkit.importing.program import Operator, Step
from qatkit.importing.regions import Edge, Regions, carries, shape
from qatkit.importing.written_file import WrittenFile, refused
from qatkit.importing.written_packed import PackedWeights
from qatkit.importing.written_weights import array_of

_IR_VERSION = 8  # the first IR version with functions
_END = 2**63 - 1


def has_another_form(regions: Regions, path: str, edges: Sequence[Edge]) -> bool:
    """Returns whether a node of the file must be rewritten because its region has other operators."""
    nodes = regions.nodes[path]
    modules = [module_of(n) for n in nodes if n.op == "call_module"]
    if any(isinstance(module, QuantizedHardSigmoid) for module in modules):
        return True
    # With 16 bits there is a pair between the HardSigmoid and the Mul of a HardSwish.
    if any(op_class(n) == "hardsigmoid" for n in nodes) and regions.loses(path):
        return True
    if any(isinstance(module, (Quantized, WeightOnly)) for module in modules) and _is_transposed(
        regions, path
    ):
        return True
    own = regions.model.get_submodule(path)
    if not isinstance(own, Operator) or not any(carries(edge.chain) for edge in edges):
        return False
    if own.node.op_type == "ReduceMean":
        return any(op_class(node) == "global_pool" for node in nodes)
    return own.node.op_type == "Swish" and own.node.version < 24


def _is_transposed(regions: Regions, path: str) -> bool:
    kinds = [type(module).__name__ for module in regions.model.get_submodule(path).modules()]
    return any(kind.startswith("ConvTranspose") for kind in kinds)


class Form:
    """Writes the region of one node of the file in place of the node."""

    def __init__(self, file: WrittenFile, packed: PackedWeights, regions: Regions, step: Step) -> None:
        self.file, self.packed, self.regions, self.step = file, packed, regions, step
        self.weights = packed.weights
        self.output = file.value(next(name for name in step.outputs if name))
        node = self.output.producer()
        assert node is not None
        self.node, self.base = node, str(self.output.name)

    def write(self, inputs: Mapping[tuple[fx.Node, int], ir.Value]) -> None:
        """Replaces the node.

        Args:
            inputs: the values that the region reads, after their chains, by `Edge.place`.
        """
        self.made: dict[fx.Node, ir.Value] = {}
        self.inputs = inputs
        last: ir.Value | None = None
        for node in self.regions.nodes[self.step.path]:
            last = self.made[node] = self._one(node)
        assert last is not None
        self.file.values[self.base] = last
        old, name = self.output, str(self.output.name)
        last.shape, last.type = old.shape, old.type
        ir.convenience.replace_all_uses_with(old, last, replace_graph_outputs=True)
        cast(ir.Graph, self.node.graph).remove(self.node, safe=True)
        last.name = name

    def _operand(self, node: fx.Node, place: int, argument: fx.Node) -> ir.Value:
        if (node, place) in self.inputs:
            return self.inputs[node, place]
        source, chain = self.regions.back(argument)
        return self.file.link(self.made[source], chain)

    def _new(self, kind: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """Inserts a node before the node that is replaced, and returns its output."""
        items = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]
        name = self.file.name(f"{self.node.name or self.base}_{kind}")
        new = ir.Node("", kind, list(inputs), items, name=name, num_outputs=1)
        new.outputs[0].name = self.file.name(f"{self.base}_{kind}_Output")
        cast(ir.Graph, self.node.graph).insert_before(self.node, new)
        return new.outputs[0]

    def _one(self, node: fx.Node) -> ir.Value:
        arguments = list(node.all_input_nodes)
        given = [self._operand(node, place, a) for place, a in enumerate(arguments)]
        module = module_of(node) if node.op == "call_module" else None
        if isinstance(module, QuantizedHardSigmoid):
            return self._hard_sigmoid(given[0], module)
        if isinstance(module, QuantizedMul):
            return self._new("Mul", given)
        if isinstance(module, (Quantized, WeightOnly)):
            return self._convolution(given[0], module)
        return self._function(node, given)

    def _function(self, node: fx.Node, given: list[ir.Value]) -> ir.Value:
        kind, name = op_class(node), called(node)
        if kind == "silu":
            return self._silu(given[0])
        if kind in ("mul", "sigmoid"):
            return self._new({"mul": "Mul", "sigmoid": "Sigmoid"}[kind], given)
        if kind == "hardsigmoid":
            return self._new("HardSigmoid", given, alpha=1 / 6, beta=0.5)
        if kind == "global_pool":
            return self._new("GlobalAveragePool", given)
        if name == "flatten" and len(shape(node)) == 2:
            return self._new("Flatten", given)
        if node.target is F.pixel_shuffle:
            return self._new("DepthToSpace", given, blocksize=int(cast(int, node.args[1])), mode="CRD")
        if name in ("unflatten", "flatten"):
            return self._new("Reshape", [given[0], self._sizes(node)])
        if name == "permute":
            return self._new("Transpose", given, perm=[int(cast(int, a)) for a in node.args[1:]])
        if name == "getitem":
            return self._slice(node, given[0])
        raise refused(
            self.file.path,
            f"node '{self.step.name}' needs {name} in 8 bits, which cannot be written into the file",
        )

    def _constant(self, array: Any, what: str) -> ir.Value:
        return self.file.constant(np.asarray(array), f"{self.base}_{what}")

    def _hard_sigmoid(self, x: ir.Value, module: QuantizedHardSigmoid) -> ir.Value:
        names = ("three", "three_scale", "three_zero_point")
        three = [
            self.weights.stored(array_of(getattr(module, name)), f"{self.base}_{name}") for name in names
        ]
        total = self._new("Add", [x, self._new("DequantizeLinear", three)])
        zero = self._constant(array_of(module.zero_point), "zero_point")
        first, second = (
            (self._constant(array_of(s), what), zero)
            for s, what in ((module.sum_scale, "sum_scale"), (module.scale, "scale"))
        )
        whole = self._new("QuantizeLinear", [total, *first])
        return self._new("DequantizeLinear", [whole, *second])

    def _silu(self, x: ir.Value) -> ir.Value:
        result = self._new("QuickGelu", [x], alpha=1.0)
        cast(ir.Node, result.producer()).domain = MICROSOFT
        model = self.file.model
        function = silu_function(model.opset_imports[""])
        model.functions.setdefault(function.identifier(), function)
        model.opset_imports.setdefault(MICROSOFT, 1)
        model.ir_version = max(model.ir_version, _IR_VERSION)
        return result

    def _convolution(self, x: ir.Value, module: Quantized | WeightOnly) -> ir.Value:
        settings: Any = module.operator.bare
        name = str(cast(ir.Value, self.node.inputs[1]).name)
        if isinstance(module, WeightOnly):
            given = [self.packed.operands(module, module.shape, name)]
            if module.bias is not None:
                given.append(self._constant(array_of(module.bias), "bias"))
        else:
            given = self.weights.operands(
                module, array_of(module.weight), array_of(module.weight_scale), 0, (name, f"{self.base}.bias")
            )
        pads = list(settings.padding)
        return self._new(
            "Conv",
            [x, *given],
            group=int(settings.groups),
            kernel_shape=list(settings.kernel_size),
            pads=pads * 2,
        )

    def _sizes(self, node: fx.Node) -> ir.Value:
        """Returns the shape of a Reshape that splits axis 1 or joins two axes; other axes keep their size."""
        sizes = self._new("Shape", [self._operand(node, 0, node.all_input_nodes[0])])
        if called(node) == "unflatten":
            first, behind, between = 1, 2, list(cast("tuple[int, ...]", node.args[2]))
        else:
            first = int(cast(int, node.args[1]))
            behind, between = first + 2, [-1]
        ends = [
            self._new("Slice", [sizes, self._constant([low], "from"), self._constant([high], "to")])
            for low, high in ((0, first), (behind, _END))
        ]
        return self._new("Concat", [ends[0], self._constant(between, "between"), ends[1]], axis=0)

    def _slice(self, node: fx.Node, x: ir.Value) -> ir.Value:
        """Returns a slice of some axes; ends are counted from the end of each axis, so that any size works."""
        parts = cast("tuple[slice, ...]", node.args[1])
        sizes = shape(node.all_input_nodes[0])
        found = []
        for axis, (part, size) in enumerate(zip(parts, sizes, strict=False)):
            start, stop, step = part.indices(size)
            if (start, stop, step) != (0, size, 1):
                found.append((start, stop - size if stop < size else _END, axis, step))
        columns = [np.array(column, np.int64) for column in zip(*found, strict=True)]
        names = ("starts", "ends", "axes", "steps")
        return self._new("Slice", [x, *(self._constant(c, n) for c, n in zip(columns, names, strict=True))])
