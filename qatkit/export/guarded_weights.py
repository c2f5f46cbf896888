"""Quantizes weights with ONNX Runtime's tools so that no sum of two products saturates on x86 CPUs without VNNI.

The limits are those of `qatkit.quant.pairs`.

    static     the tool gets a wider range for each weight or channel that needs one
    dynamic    the tool accepts no ranges, so a MatMulInteger gets new integers, computed with a larger scale

ConvInteger and depthwise convolutions accumulate in 32 bits on every CPU, so they are not changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from qatkit.export.for_ort_tools import weights
from qatkit.quant.pairs import least_scale
from qatkit.verify.graph_view import constant, operand

_INT8_MAX = 127
_QUANTIZED = "_quantized"  # suffix of a weight's name in the files of the tools


def range_overrides(
    model: ir.Model, *, per_channel: bool, single: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """Returns the entries of `TensorQuantOverrides` for the weights that need a wider range than their own.

    Args:
        model: the float model that the static tool gets.
        per_channel: whether weights have one scale per output channel.
        single: the names of weights that have only one scale even if `per_channel` is set.
    """
    found = {}
    for value, axis in weights(model).items():
        values, name = constant(value), str(value.name)
        if values is None or all(_adds_in_32_bits(node) for node in value.consumers()):
            continue
        channels = per_channel and name not in single
        own = np.abs(values).max(tuple(d for d in range(values.ndim) if not channels or d != axis))
        ends = np.maximum(own, _INT8_MAX * _least(value, values, per_channel=channels))
        if (ends <= own).all():
            continue
        entries = [{"symmetric": True, "rmin": -end, "rmax": end} for end in np.atleast_1d(ends).tolist()]
        found[name] = [{**entry, "axis": axis} for entry in entries] if channels else entries
    return found


def guard_matrices(quantized: ir.Model, model: ir.Model) -> None:
    """Replaces the integers and scales of matrices [inputs, outputs] whose sums of products could saturate, in place.

    Args:
        quantized: the output of the dynamic tool, with one scale per output channel.
        model: the float model that was given to the tool.
    """
    for node in quantized.graph:
        integers = constant(operand(node, 1)) if node.op_type == "MatMulInteger" else None
        if integers is None or integers.dtype != np.int8 or integers.ndim != 2:
            continue
        value = node.inputs[1]
        assert value is not None, "it holds the integers"
        name = str(value.name).removesuffix(_QUANTIZED)
        scales, original = (graph.initializers.get(one) for graph, one in (
            (quantized.graph, f"{name}_scale"), (model.graph, name)))  # fmt: skip
        weight, scale = constant(original), constant(scales)
        if weight is None or scale is None:
            continue  # no larger scale can be computed, so the integers stay
        weight = _turned(weight, integers, scale)
        larger = np.maximum(scale, _rows_least(weight.T))
        whole = np.clip(np.rint(weight / larger), -_INT8_MAX, _INT8_MAX).astype(np.int8)
        value.const_value = ir.tensor(whole, name=value.name)
        assert scales is not None, "it was read"
        scales.const_value = ir.tensor(larger.astype(np.float32), name=scales.name)


def _adds_in_32_bits(node: ir.Node) -> bool:
    """Returns whether an operator adds in 32 bits: a depthwise Conv does, and a ConvTranspose, which runs in float."""
    if node.op_type == "ConvTranspose":
        return True
    weight, groups = constant(operand(node, 1)), node.attributes.get_int("group", 1)
    return (
        node.op_type == "Conv" and weight is not None and 1 < groups == len(weight) and weight.shape[1] == 1
    )


def _least(value: ir.Value, values: NDArray[np.float32], *, per_channel: bool) -> NDArray[np.float32]:
    """Returns the smallest scale, [channels] or [], that is safe for every operator that reads the weight."""
    found = []
    for node in value.consumers():
        if operand(node, 1) is not value:
            continue  # the tool leaves the operator in float
        if node.op_type == "Conv":
            found.append(least_scale(torch.from_numpy(values.copy()), per_channel=per_channel).numpy())
        elif node.op_type in ("Gemm", "MatMul"):
            turned = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
            rows = values if turned else np.swapaxes(values, -1, -2)
            least = _rows_least(rows.reshape(-1, rows.shape[-1]))
            found.append(least if per_channel else least.max())
    return np.asarray(np.max(found, axis=0) if found else 0.0, np.float32)


def _rows_least(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the smallest safe scale of each row of a matrix [outputs, inputs], float32 [outputs]."""
    return np.asarray(least_scale(torch.from_numpy(np.array(rows, order="C")), per_channel=True).numpy())


def _turned(weight: NDArray[Any], integers: NDArray[Any], scale: NDArray[Any]) -> NDArray[Any]:
    """Returns the weight in the layout of the integers, which the tool may have transposed."""
    if weight.shape != integers.shape:
        return weight.T
    alike = weight.shape[0] != weight.shape[1] or np.abs(weight - integers * scale).max() <= scale.max()
    return weight if alike else weight.T
