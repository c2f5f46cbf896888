"""Edits an ONNX file: finds its values by their original names, and inserts nodes between them.

Every new name is derived from the value or node to which it belongs, with a number if the name is taken.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from qatkit.export.rewrite import MICROSOFT
from qatkit.importing.operators.table import Array
from qatkit.importing.program import ImportedModel
from qatkit.importing.read import infer_shapes, name_of, read
from qatkit_verify.errors import ConfigError

_OTHER_FLOATS = (ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_PAIRS = ("QuantizeLinear", "DequantizeLinear")
_SIXTEEN, _STANDARD_16 = (ir.DataType.INT16, ir.DataType.UINT16), 21
_SIZES = ("Shape", "Size")  # they read only the shape, so they may read quantized values
_PASSING = ("Identity", "Dropout")
_LONGEST = 100  # characters of a derived name


@dataclass(frozen=True)
class Pair:
    """A QuantizeLinear with the DequantizeLinear that follows it.

    Attributes:
        scale, zero_point, dtype: the encoding, in a type of 8 or 16 bits.
        ends: the values to which the input is clipped first; None if these are the ends of the type.
    """

    scale: float
    zero_point: int
    dtype: str
    ends: tuple[float, float] | None = None

    @property
    def largest(self) -> float:
        """The largest value that the pair can return."""
        return (int(np.iinfo(self.dtype).max) - self.zero_point) * self.scale


BARRIER = "barrier"  # an operator that no fusion of ONNX Runtime crosses


@dataclass(frozen=True)
class Layout:
    """A pool with windows of one position, which returns its input and stops Transposes that ONNX Runtime moves.

    Attributes:
        axes: the number of spatial axes.
    """

    axes: int


Chain = tuple[Pair | Layout | str, ...]  # everything between two operators, in the order of execution


def refused(file: Path, reason: str) -> ConfigError:
    """Returns the error for a module that cannot be written back."""
    return ConfigError("onnx", file, reason=reason)


class WrittenFile:
    """A copy of the file of an imported model, in memory.

    Args:
        model: the imported model.
        opset: the lowest opset that the edited file may have.

    Raises:
        ConfigError: the file cannot be read again, or cannot be converted to that opset.
    """

    def __init__(self, model: ImportedModel, opset: int) -> None:
        self.path, self.model = model.file, _at(model.file, read(model.file), opset)
        self.graph = self.model.graph
        for node in self.graph:  # reports and overrides use these names, which the audit reads from the file
            node.name = name_of(node)
        if any(value.type is None for value in self.graph.outputs):
            infer_shapes(self.model)  # onnx's checker needs the types
        self._taken = _names(self.graph)
        for name, value in model.fixed.items():
            self._fix(name, value)
        self._inline(model.taken)
        made = (value for node in self.graph for value in node.outputs)
        known = (*self.graph.inputs, *self.graph.initializers.values(), *made)
        self.values: dict[str, ir.Value] = {str(value.name): value for value in known if value.name}
        self._inside = _in_branches(self.graph)
        self._unread = {id(node) for node in self.graph if not _is_read(node)}
        self._unread |= {id(value) for value in self.graph.initializers.values() if not value.uses()}
        self.added: set[ir.Node] = set()
        self._links: dict[tuple[int, Chain], ir.Value] = {}

    def name(self, wanted: str) -> str:
        """Returns `wanted` as a new name: with a number appended if it is taken, and without its middle if it is long.

        TensorFlow's converters join the names of all operators that became one node, to hundreds of characters.
        """
        if len(wanted) > _LONGEST:
            wanted = f"{wanted[: _LONGEST // 2]}...{wanted[-_LONGEST // 2 :]}"
        free = next(
            n for i in itertools.count() if (n := f"{wanted}_{i}" if i else wanted) not in self._taken
        )
        self._taken.add(free)
        return free

    def value(self, name: str) -> ir.Value:
        """Returns the value that had this name in the original file; it may have been renamed since."""
        return self.values[name]

    def maker(self, name: str) -> ir.Node:
        """Returns the node that computes a value.

        Raises:
            ConfigError: no node computes it, or nodes in several branches do.
        """
        value = self.values.get(name) or self._inside.get(name)
        node = None if value is None else value.producer()
        if node is None:
            raise refused(
                self.path,
                f"weights cannot be written back at '{name}', which no node or several nodes of branches compute",
            )
        return node

    def constant(self, array: Any, name: str) -> ir.Value:
        """Returns a new initializer."""
        name = self.name(name)
        tensor = ir.tensor(np.ascontiguousarray(array).reshape(np.shape(array)), name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(np.shape(array)), const_value=tensor
        )
        self.graph.register_initializer(value)
        return value

    def node(
        self,
        after: ir.Value | ir.Node | None,
        kind: str,
        inputs: Sequence[ir.Value | None],
        base: str,
        attributes: Iterable[ir.Attr] = (),
    ) -> ir.Value:
        """Inserts a node and returns its output.

        It comes after the value or node `after`, or first if that is an input, a constant or None.
        """
        name = self.name(f"{base}_{kind}")
        domain = self._domain_of_pair(inputs) if kind in _PAIRS else ""
        new = ir.Node(domain, kind, list(inputs), list(attributes), name=name, num_outputs=1)
        new.outputs[0].name = self.name(f"{base}_{kind}_Output")
        self.added.add(new)
        before = after if isinstance(after, ir.Node) else None if after is None else after.producer()
        if before is None:
            self.graph.insert_before(self.graph[0], new)
        else:
            self.graph.insert_after(before, new)
        return new.outputs[0]

    def _domain_of_pair(self, inputs: Sequence[ir.Value | None]) -> str:
        """Returns the domain of a pair's operators: ONNX Runtime's own for 16 bits before opset 21, otherwise ""."""
        zero = inputs[2] if len(inputs) > 2 else None
        if zero is None or zero.dtype not in _SIXTEEN or self.model.opset_imports.get("", 1) >= _STANDARD_16:
            return ""
        self.model.opset_imports.setdefault(MICROSOFT, 1)
        return MICROSOFT

    def link(self, value: ir.Value, chain: Chain) -> ir.Value:
        """Returns `value` after the links of a chain; readers with the same chain share its nodes."""
        if chain and (kind := other_float(value)) is not None:
            return self._converted(value, kind, chain)
        for count in range(1, len(chain) + 1):
            key = id(value), chain[:count]
            source = self._links.get((id(value), chain[: count - 1]), value) if count > 1 else value
            if key not in self._links:
                self._links[key] = self._one_link(source, chain[count - 1], str(value.name))
        return self._links[id(value), chain] if chain else value

    def _converted(self, value: ir.Value, kind: ir.DataType, chain: Chain) -> ir.Value:
        """Writes a chain for a value whose float type is not float32, the type of the scales.

        If a Cast from float32 makes the value and only one node reads it, the chain is inserted before this Cast.
        Otherwise it is inserted between two new Casts.
        """
        maker = value.producer()
        if maker is not None and maker.op_type == "Cast" and len(value.uses()) + value.is_graph_output() < 2:
            before = maker.inputs[0]
            if before is not None and _type_of(before) == ir.DataType.FLOAT:
                maker.replace_input_with(0, self.link(before, chain))
                return value
        key = id(value), chain
        if key not in self._links:
            base = str(value.name)
            single = self.node(value, "Cast", [value], base, [ir.AttrInt64("to", int(ir.DataType.FLOAT))])
            single.type, single.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
            quantized = self.link(single, chain)
            to = [ir.AttrInt64("to", int(kind))]
            self._links[key] = self.node(quantized, "Cast", [quantized], base, to)
        return self._links[key]

    def _one_link(self, value: ir.Value, link: Pair | Layout | str, base: str) -> ir.Value:
        if isinstance(link, Layout):
            return self.node(
                value, "AveragePool", [value], base, [ir.AttrInt64s("kernel_shape", [1] * link.axes)]
            )
        if isinstance(link, str):
            return self.node(value, "Sum", [value], base)
        kind = np.dtype(link.dtype)
        if link.ends is not None:
            low, high = (self.constant(np.float32(end), f"{base}_end") for end in link.ends)
            value = self.node(value, "Clip", [value, low, high], base)
        scale = self.constant(np.array(link.scale, np.float32), f"{base}_scale")
        zero = self.constant(np.array(link.zero_point, kind), f"{base}_zero_point")
        return self.pair(value, (scale, zero), (scale, zero), base)

    def pair(
        self,
        value: ir.Value,
        first: tuple[ir.Value, ir.Value],
        second: tuple[ir.Value, ir.Value],
        base: str,
    ) -> ir.Value:
        """Returns `value`, quantized by scale and zero_point in `first` and dequantized by those in `second`."""
        whole = self.node(value, "QuantizeLinear", [value, *first], base)
        for reader, place in list(value.uses()):
            if reader.op_type in _SIZES and value.producer() is not None:
                reader.replace_input_with(place, whole)
        return self.node(whole, "DequantizeLinear", [whole, *second], base)

    def bypass(self, old: ir.Value, new: ir.Value) -> None:
        """Replaces `old` with `new`, under the name of `old`, and removes the node that computes `old`.

        This node must be the only reader of `new`.
        """
        name, node = str(old.name), old.producer()
        assert node is not None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.shape, new.type = old.shape, old.type
        self.graph.remove(node, safe=True)
        new.name = name
        for known, value in list(self.values.items()):
            if value is old:
                self.values[known] = new

    def is_static(self) -> bool:
        """Returns whether the sizes of all inputs are numbers."""
        shapes = [value.shape for value in self.graph.inputs]
        return all(shape is not None and shape.is_static() for shape in shapes)

    def tidy(self) -> None:
        """Removes nodes and constants that nothing reads any more."""
        for node in reversed(list(self.graph)):
            if id(node) not in self._unread and not _is_read(node):
                self.graph.remove(node, safe=True)
        for name, value in list(self.graph.initializers.items()):
            if id(value) not in self._unread and not value.uses() and not value.is_graph_output():
                del self.graph.initializers[name]

    def _fix(self, name: str, array: Array) -> None:
        """Turns an input into a constant."""
        value = next(value for value in self.graph.inputs if value.name == name)
        kind = None if value.dtype is None else value.dtype.numpy()
        self.graph.inputs.remove(value)
        value.const_value = ir.tensor(array if kind is None else array.astype(kind), name=name)
        self.graph.register_initializer(value)

    def _inline(self, taken: dict[str, int]) -> None:
        """Replaces every If whose condition is constant with the nodes of the branch that it takes."""
        while node := next((n for n in self.graph if n.op_type == "If" and _first(n) in taken), None):
            branch = node.attributes[("then_branch", "else_branch")[taken[_first(node)]]].as_graph()
            for value in list(branch.initializers.values()):
                branch.initializers.pop(str(value.name))
                self.graph.register_initializer(value)
            results = list(branch.outputs)
            for inner in list(branch):
                branch.remove(inner)
                self.graph.insert_before(node, inner)
            for old, made in zip(node.outputs, results, strict=True):
                new = self._named(node, old, made) if old.is_graph_output() else made
                ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            self.graph.remove(node, safe=True)

    def _named(self, before: ir.Node, old: ir.Value, new: ir.Value) -> ir.Value:
        """Returns an Identity of `new`, which replaces `old` as an output of the graph."""
        named = ir.Node("", "Identity", [new], num_outputs=1)
        self.graph.insert_before(before, named)
        result, name = named.outputs[0], str(old.name)
        result.type, result.shape = old.type, old.shape
        old.name, result.name = self.name(f"{name}_If"), name
        return result


def _at(path: Path, model: ir.Model, opset: int) -> ir.Model:
    """Returns the model, upgraded to an opset if its own is lower."""
    own = model.opset_imports.get("", 1)
    if own >= opset:
        return model
    from qatkit.export.float_graph import upgraded
    from qatkit.export.quiet import quiet

    with quiet():
        found = upgraded(path, ir.to_proto(model), own, opset)
    found.graph.sort()
    return found


def _names(graph: ir.Graph) -> set[str]:
    """Returns all names of nodes and values, including those in branches and loop bodies."""
    found = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        found |= {str(node.name), *(str(value.name) for value in node.outputs)}
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                inner = attribute.as_graph()
                found |= {str(value.name) for value in (*inner.inputs, *inner.initializers.values())}
    return found


def _in_branches(graph: ir.Graph) -> dict[str, ir.Value]:
    """Returns, by name, the values whose names are unique among the graph, its branches and its loop bodies."""
    made = [value for node in ir.traversal.RecursiveGraphIterator(graph) for value in node.outputs]
    count = Counter(value.name for value in made)
    return {str(value.name): value for value in made if count[value.name] == 1}


def other_float(value: ir.Value) -> ir.DataType | None:
    """Returns the float type of a value if the file or a Cast shows that it is not float32; otherwise None."""
    kind = _type_of(value)
    return kind if kind in _OTHER_FLOATS else None


def _type_of(value: ir.Value) -> ir.DataType | None:
    """Returns the type of a value from its declaration or from the Cast that makes it; None if neither exists."""
    maker = value.producer()
    if value.dtype is None and maker is not None and maker.op_type == "Cast":
        return ir.DataType(maker.attributes.get_int("to", int(ir.DataType.FLOAT)))
    return value.dtype


def _first(node: ir.Node) -> str:
    return next((str(value.name) for value in node.outputs if value.name), "")


def _is_read(node: ir.Node) -> bool:
    return any(value.uses() or value.is_graph_output() for value in node.outputs)
