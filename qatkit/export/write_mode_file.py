"""Finishes the file of a conversion mode: compares weights with the float file, cleans the graph, writes the file.

If a tool skips an operator, or stops in the middle of a change, the file still loads and runs, but with wrong weights.
Therefore each weight of the float file is looked up in the new file by name, dequantized with the new file's scales,
and compared. It may differ by one step of its scale (in float16: by the rounding error). If it differs by more, the
mode runs again and leaves the operators that read this weight in float.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common

from qatkit.export.for_ort_tools import recurrent_weights, weights
from qatkit.export.int8_tables import tables
from qatkit.export.quiet import quiet
from qatkit.export.write_model import write_model
from qatkit.verify.graph_view import constant, operand

_SLACK = 1.001  # largest error in steps; a bit more than 1, since the scale is rounded to float32
_HALF_STEP, _HALF_LEAST = (
    2.0**-10,
    1.2e-7,
)  # the step of float16: relative for normal numbers, absolute below them
_Array = NDArray[Any]


@dataclass(frozen=True)
class Exact:
    """A weight of the float file.

    Attributes:
        values: the values in the float file.
        nodes: the names of the operators that read it.
    """

    values: _Array
    nodes: tuple[str, ...]

    @property
    def node(self) -> str:
        """The name of the first operator that reads the weight."""
        return self.nodes[0]


def exact_weights(model: ir.Model) -> dict[str, Exact]:
    """Returns the weights of a float model by name, for comparison with a quantized file.

    Raises:
        ValueError: a weight is not finite.
    """
    found = {}
    for value in (*weights(model), *recurrent_weights(model), *tables(model)):
        values, readers = constant(value), value.consumers()
        if values is not None and readers:
            if not np.isfinite(values).all():
                raise ValueError(f"the weight '{value.name}' of '{readers[0].name}' contains NaN or infinity")
            found[str(value.name)] = Exact(values, tuple(str(node.name) for node in readers))
    return found


def without_wrong_weights(
    make: Callable[[Collection[str]], ir.Model], exact: Mapping[str, Exact]
) -> tuple[ir.Model, list[str]]:
    """Quantizes a model repeatedly, leaving operators with wrong weights in float, until all weights are right.

    Args:
        make: a function that returns a quantized model in which the operators with the given names stay float.
        exact: the weights that the model must contain (`exact_weights`).

    Returns:
        The cleaned model, and the names of the operators that stay float because their weights would be wrong.

    Raises:
        ValueError: a weight is wrong although its operators should stay float.
    """
    left = list[str]()
    while True:
        model = _cleaned(make(left))
        wrong = wrong_weights(model, exact)
        names = dict.fromkeys(node for name in wrong for node in exact[name].nodes)
        if not wrong:
            return model, left
        if names.keys() <= set(left):
            raise ValueError(next(iter(wrong.values())))
        left += [name for name in names if name not in left]


def _cleaned(model: ir.Model) -> ir.Model:
    with quiet():
        for cleaning in (
            common.TopologicalSortPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedOpsetsPass(),
            common.ClearMetadataAndDocStringPass(),
        ):
            cleaning(model)
    return model


def write_mode_file(model: ir.Model, target: Path) -> None:
    """Writes a converted model atomically, without metadata of the float file.

    Raises:
        ValueError: the checker or ONNX Runtime refuses the file.
    """
    model.metadata_props.clear()
    model.producer_name, model.producer_version = "qatkit", None
    write_model(model, target)


def wrong_weights(model: ir.Model, exact: Mapping[str, Exact]) -> dict[str, str]:
    """Compares every dequantized weight of a quantized model with the float weight.

    Returns:
        What is wrong with each wrong weight, as a clause, by the weight's name.
    """
    made = {value.name: value for node in model.graph for value in node.outputs}
    found = {name: _why_wrong(model.graph, made, name, one) for name, one in exact.items()}
    return {name: reason for name, reason in found.items() if reason}


def _why_wrong(graph: ir.Graph, made: Mapping[str | None, ir.Value], name: str, one: Exact) -> str:
    """Returns what is wrong with a weight, or "" if it is right."""
    try:
        forms = list(_held(graph, made, name))
    except ValueError as error:
        return str(error)
    if not forms:
        return f"the file would lack the weight '{name}' of '{one.node}'"
    for values, step in forms:
        off = min(_off(values, step, one.values), _off(values.T, step.T, one.values))
        if not np.isfinite(off):
            return (
                f"the weight '{name}' of '{one.node}' would have another shape or values that are not finite"
            )
        if off > _SLACK:
            return f"the weight '{name}' of '{one.node}' would be wrong by up to {off:.3g} steps of its scale"
    return ""


def _off(values: _Array, step: _Array, exact: _Array) -> float:
    """Returns the largest difference in steps; infinite if the shapes differ, NaN if values are not finite."""
    if values.shape != exact.shape:
        return np.inf
    difference = np.abs(values.astype(np.float64) - exact)
    least = np.finfo(np.float32).tiny
    return float((difference / np.maximum(step, least)).max()) if difference.size else 0.0


def _held(graph: ir.Graph, made: Mapping[str | None, ir.Value], name: str) -> Iterator[tuple[_Array, _Array]]:
    """Yields the values of a weight in every form in which the file contains it, each with the allowed error."""
    stored = graph.initializers.get(name)
    if stored is not None:
        yield _dequantized(stored)
    if name in made:
        yield _dequantized(made[name])
    integers = graph.initializers.get(f"{name}_quantized")
    if integers is None or name in made:
        return
    pairs = [node for node in integers.consumers() if node.op_type == "DequantizeLinear"]
    for node in pairs:
        yield _dequantized(node.outputs[0])
    if not pairs:
        yield _of_product(graph, name, integers)


def _of_product(graph: ir.Graph, name: str, integers: ir.Value) -> tuple[_Array, _Array]:
    """Returns a weight of a ConvInteger or MatMulInteger, whose scale multiplies the result, and its steps."""
    scale, zero_point = (
        constant(graph.initializers.get(f"{name}_{part}")) for part in ("scale", "zero_point")
    )
    held = constant(integers)
    assert held is not None
    if scale is None:
        raise ValueError(f"the weight '{name}' would have no scale")
    if integers.consumers()[0].op_type == "ConvInteger":
        scale = scale.reshape(-1, *[1] * (held.ndim - 1))
    zero = 0 if zero_point is None else zero_point.astype(np.int32)
    step = np.broadcast_to(scale, held.shape)
    return (held.astype(np.int32) - zero) * step, step


def _dequantized(value: ir.Value) -> tuple[_Array, _Array]:
    """Returns a constant and its steps by evaluating the operators that dequantize it or move its values."""
    held, node = constant(value), value.producer()
    if held is not None:
        exactly = np.abs(held.astype(np.float64)) * 2.0**-20 if held.dtype == np.float32 else np.zeros(())
        if held.dtype == np.float16:
            exactly = np.abs(held.astype(np.float64)) * _HALF_STEP + _HALF_LEAST
        return held, np.broadcast_to(exactly, held.shape)
    assert node is not None, value
    values, step = _dequantized(_input(node, 0))
    if node.op_type == "DequantizeLinear":
        return _by_pair(node, values)
    if node.op_type == "Mul":
        factor, _ = _dequantized(_input(node, 1))
        return values * factor, np.broadcast_to(factor, values.shape)
    if node.op_type == "Reshape":
        shape = constant(operand(node, 1))
        assert shape is not None, node
        return values.reshape(shape), step.reshape(shape)
    if node.op_type == "Transpose":
        order = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
        return values.transpose(order), step.transpose(order)
    if node.op_type in ("Cast", "Identity"):
        return values.astype(np.float32), step
    raise ValueError(f"an unexpected operator, '{node.name}' ({node.op_type}), would compute a weight")


def _by_pair(node: ir.Node, integers: _Array) -> tuple[_Array, _Array]:
    scale, zero_point = constant(operand(node, 1)), constant(operand(node, 2))
    assert scale is not None, node
    axis = node.attributes.get_int("axis", 1) % max(integers.ndim, 1)
    shape = [-1 if one == axis else 1 for one in range(integers.ndim)] if scale.ndim else []
    zero = 0 if zero_point is None else zero_point.astype(np.int32).reshape(shape)
    step = np.broadcast_to(scale.reshape(shape), integers.shape)
    return (integers.astype(np.int32) - zero) * step, step


def _input(node: ir.Node, index: int) -> ir.Value:
    value = operand(node, index)
    assert value is not None, node
    return value
