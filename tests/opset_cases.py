"""Graphs of opset 18 with one or two operators that a lower opset writes differently or cannot express."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

Arrays = Mapping[str, NDArray[Any]]
RNG = np.random.default_rng(0)
IMAGE: tuple[int, ...] = (2, 3, 5, 7)


class Case(NamedTuple):
    """A graph from "x" to "y", its constants, and the operators that the lowered graph must contain or lack."""

    nodes: list[NodeProto]
    constants: Arrays = MappingProxyType({})
    shape: tuple[int, ...] = IMAGE
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    outputs: int = 1


def op(kind: str, inputs: str = "x", outputs: str = "y", **attributes: Any) -> NodeProto:
    return helper.make_node(kind, inputs.split(","), outputs.split(","), **attributes)


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def floats(*shape: int) -> NDArray[np.float32]:
    return RNG.normal(size=shape).astype(np.float32)


def gelu(swap: bool = False, half_last: bool = False) -> list[NodeProto]:
    """Returns x·(½·(1 + erf(x/√2))) as torch's exporter writes it, with operands swapped on request."""
    inner = "one_plus,half" if half_last else "half,one_plus"
    return [
        op("Div", "x,root", "scaled"), op("Erf", "scaled", "erf"), op("Add", "erf,one", "one_plus"),
        op("Mul", inner, "inner"), op("Mul", "inner,x" if swap else "x,inner", "y"),
    ]  # fmt: skip


GELU = {
    "root": np.array(math.sqrt(2), np.float32),
    "one": np.array(1, np.float32),
    "half": np.array(0.5, np.float32),
}
GAMMA, BETA = {"g": floats(7)}, {"g": floats(7), "b": floats(7)}
CASES: dict[str, Case] = {
    "layer_norm": Case(
        [op("LayerNormalization", "x,g,b", epsilon=1e-3)], BETA, lacks=("LayerNormalization",)
    ),
    "layer_norm_no_bias": Case([op("LayerNormalization", "x,g")], GAMMA, lacks=("LayerNormalization",)),
    "layer_norm_axis": Case([op("LayerNormalization", "x,g,b", axis=2)], {"g": floats(5, 7), "b": floats(5, 7)}),
    "layer_norm_negative_axis": Case([op("LayerNormalization", "x,g", axis=-3)], {"g": floats(3, 5, 7)}),
    "split_uneven": Case([op("Split", "x", "y0,y1,y2", axis=3, num_outputs=3)]),
    "split_even": Case([op("Split", "x", "y0,y1,y2", axis=1, num_outputs=3)]),
    "split_negative_axis": Case([op("Split", "x", "y0,y1", axis=-1, num_outputs=2)]),
    "split_sizes": Case([op("Split", "x,s", "y0,y1", axis=3)], {"s": ints(2, 5)}),
    "pad_axes": Case([op("Pad", "x,p,v,a")], {"p": ints(1, 2, 3, 0), "v": np.array(2, np.float32), "a": ints(3, 1)}),
    "pad_negative_axes": Case([op("Pad", "x,p,,a")], {"p": ints(1, 2, 0, 1), "a": ints(-1, -2)}),
    "pad_reflect_axes": Case([op("Pad", "x,p,,a", mode="reflect")], {"p": ints(1, 2, 3, 1), "a": ints(2, 3)}),
    "pad_plain": Case([op("Pad", "x,p")], {"p": ints(0, 0, 1, 2, 0, 0, 3, 4)}),
    "shape_start": Case([op("Shape", "x", "y", start=1)], has=("Slice",)),
    "shape_start_end": Case([op("Shape", "x", "y", start=1, end=3)], has=("Slice",)),
    "shape_negative": Case([op("Shape", "x", "y", start=-3, end=-1)], has=("Slice",)),
    "shape_end": Case([op("Shape", "x", "y", end=2)], has=("Slice",)),
    "shape_plain": Case([op("Shape", "x", "y")], lacks=("Slice",)),
    "hard_swish": Case([op("HardSwish")], lacks=("HardSwish",), has=("HardSigmoid",)),
    "reshape_allowzero": Case([op("Reshape", "x,s", allowzero=1)], {"s": ints(6, -1)}),
    "reshape_zero_copies": Case([op("Reshape", "x,s")], {"s": ints(0, -1)}),
    "global_pool": Case([op("ReduceMean", "x,a")], {"a": ints(2, 3)}, has=("GlobalAveragePool",)),
    "global_pool_negative": Case([op("ReduceMean", "x,a")], {"a": ints(-1, -2)}, has=("GlobalAveragePool",)),
    "mean_of_one_axis": Case([op("ReduceMean", "x,a")], {"a": ints(2)}, lacks=("GlobalAveragePool",)),
    "mean_without_keepdims": Case(
        [op("ReduceMean", "x,a", keepdims=0)], {"a": ints(2, 3)}, lacks=("GlobalAveragePool",)
    ),
    "mean_of_channels": Case([op("ReduceMean", "x,a")], {"a": ints(1, 2)}, lacks=("GlobalAveragePool",)),
    "mean_of_tokens": Case([op("ReduceMean", "x,a")], {"a": ints(1)}, shape=(2, 5, 8)),
    "mean_of_all": Case([op("ReduceMean", "x")]),
    "mean_of_empty_axes": Case([op("ReduceMean", "x,a")], {"a": ints()}),
    "mean_noop": Case([op("ReduceMean", "x", noop_with_empty_axes=1)]),
    "batch_norm": Case(
        [op("BatchNormalization", "x,g,b,m,v", training_mode=0)],
        {"g": floats(3), "b": floats(3), "m": floats(3), "v": np.abs(floats(3)) + 0.5},
    ),
    "scatter_nd": Case(
        [op("ScatterND", "x,i,u", reduction="none")], {"i": ints(1, 0).reshape(1, 2), "u": floats(1, 5, 7)}
    ),
    "resize": Case(
        [op("Resize", "x,,s", mode="nearest", antialias=0, keep_aspect_ratio_policy="stretch")],
        {"s": np.array([1, 1, 2, 2], np.float32)},
    ),
    "gelu": Case(gelu(), GELU),
    "gelu_swapped": Case(gelu(swap=True, half_last=True), GELU),
    "products_that_are_no_gelu": Case(
        [op("Mul", "x,half", "h"), op("Mul", "h,x", "m"), op("Mul", "x,m")], {"half": GELU["half"]}
    ),
}  # fmt: skip
TEN = {"ten": np.array(10, np.float32)}


def on_integers(kind: int, *nodes: NodeProto) -> Case:
    """Returns a case whose nodes lead from "i", the input times ten as an integer, to "y"."""
    return Case([op("Mul", "x,ten", "t"), op("Cast", "t", "i", to=kind), *nodes], TEN)


def recurrent(kind: str, gates: int, outputs: str = "y0,y1", **attributes: Any) -> Case:
    """Returns a case with a bidirectional recurrent layer of hidden size 4; [5, 2, 7] is [steps, batch, features]."""
    shapes = {"w": (2, gates * 4, 7), "r": (2, gates * 4, 4), "b": (2, gates * 8), "h": (2, 2, 4)}
    constants = {name: 0.5 * floats(*shape) for name, shape in shapes.items()}
    node = op(kind, "x,w,r,b,,h", outputs, hidden_size=4, direction="bidirectional", layout=0, **attributes)
    return Case([node], constants, shape=(5, 2, 7))


CASES |= {
    "mish": Case([op("Mish")], has=("Softplus",), lacks=("Mish",)),
    "cast_like": Case([op("Shape", "x", "s"), op("CastLike", "x,s", "y")], has=("Cast",), lacks=("CastLike",)),
    "upper": Case([op("Trilu", "x,k")], {"k": np.array(1, np.int64)}, lacks=("Trilu",)),
    "lower": Case([op("Trilu", "x,k", upper=0)], {"k": np.array(-2, np.int64)}),
    "diagonal": Case([op("Trilu")]),
    "lower_bool": Case([op("Greater", "x,z", "p"), op("Trilu", "p", "y", upper=0)], {"z": np.array(0, np.float32)}),
    "lower_int": on_integers(TensorProto.INT64, op("Trilu", "i", "y", upper=0)),
    "lower_of_any_size": Case(  # shape inference cannot determine the sizes of the last two axes
        [op("Shape", "x", "s", start=-1), op("Expand", "o,s", "u"), op("Mul", "x,u", "v"), op("Tile", "v,n", "w"),
         op("Trilu", "w", "y", upper=0)],
        {"o": np.ones(1, np.float32), "n": ints(1, 1, 1, 1)}, has=("LessOrEqual",),
    ),
    "lstm": recurrent("LSTM", 4, "y0,y1,y2"),
    "gru": recurrent("GRU", 3, linear_before_reset=1),
    "rnn": recurrent("RNN", 1),
    "complement": on_integers(TensorProto.INT64, op("BitwiseNot", "i", "y")),
    "complement_unsigned": on_integers(
        TensorProto.INT32, op("Abs", "i", "a"), op("Cast", "a", "u", to=TensorProto.UINT32), op("BitwiseNot", "u", "y")
    ),
    "relu_int": on_integers(TensorProto.INT32, op("Relu", "i", "y")),
    "resize_axes": Case([op("Resize", "x,,s", axes=[2, 3])], {"s": np.array([2, 1.5], np.float32)}),
    "resize_axes_to": Case([op("Resize", "x,,,s", axes=[-1, 2], mode="linear")], {"s": ints(4, 9)}),
    "pad_computed": Case(
        [op("Shape", "x", "s", start=0, end=2), op("Concat", "s,s", "p", axis=0), op("Pad", "x,p,,a")],
        {"a": ints(3, 1)}, has=("Gather",),
    ),
    "fold": Case(
        [op("Col2Im", "x,s,k", pads=[1, 0, 1, 0], strides=[2, 1])], {"s": ints(5, 6), "k": ints(2, 3)},
        shape=(2, 12, 12),
    ),
    "fold_dilated": Case(
        [op("Col2Im", "x,s,k", dilations=[2, 1], strides=[2, 3])], {"s": ints(6, 8), "k": ints(2, 2)}, shape=(2, 8, 6)
    ),
    "pool_of_powers": Case([op("LpPool", kernel_shape=[2, 2], ceil_mode=0, dilations=[1, 1], p=3)]),
    "average_up": Case([op("AveragePool", kernel_shape=[3, 2], strides=[3, 2], ceil_mode=1)]),
    "average_up_padded": Case(
        [op("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 0, 0], ceil_mode=1, count_include_pad=1)],
        has=("Pad",),
    ),
    "average_up_inner": Case(
        [op("AveragePool", kernel_shape=[3, 4], strides=[2, 2], pads=[1, 2, 1, 1], ceil_mode=1)], lacks=("Pad",)
    ),
    "regions_before": Case(
        [op("RoiAlign", "x,r,i", coordinate_transformation_mode="output_half_pixel", output_height=2, output_width=2)],
        {"r": np.array([[0, 1, 3, 4]], np.float32), "i": ints(1)},
    ),
}  # fmt: skip
CASES |= {
    f"{kind.lower()}_int8": on_integers(
        TensorProto.INT8, op(kind, "i,i", "s"), op("Cast", "s", "y", to=TensorProto.INT32)
    )
    for kind in ("Add", "Sub", "Mul")
}
CASES |= {
    f"reduce_{kind.lower()}": Case([op(f"Reduce{kind}", "p,a")], {"a": ints(1, 3)})
    for kind in ("Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "LogSum", "SumSquare", "Sum")
}
for _name, _case in list(CASES.items()):
    if _name.startswith("reduce_"):  # the logarithm of a sum needs positive numbers
        _case.nodes.insert(0, op("Abs", "x", "p"))


# First opset in which the case is legal as written, from the changelog of the ONNX specification.
SINCE: dict[str, int] = {
    "layer_norm": 17, "layer_norm_axis": 17, "hard_swish": 14, "shape_start": 15, "shape_end": 15,
    "reshape_allowzero": 14, "scatter_nd": 16, "split_even": 18, "pad_axes": 18,
    "mean_of_one_axis": 18, "mean_noop": 18, "resize": 18, "mish": 18, "cast_like": 15, "upper": 14, "lstm": 14,
    "gru": 14, "rnn": 14, "fold": 18,
    "complement": 18, "relu_int": 14, "add_int8": 14, "resize_axes": 18, "pool_of_powers": 18,
    "regions_before": 16,
    **{name: 18 for name in CASES if name.startswith("reduce_") and name != "reduce_sum"},
    "reduce_sum": 13, "split_sizes": 13, "pad_plain": 13, "reshape_zero_copies": 13,
}  # fmt: skip


REFUSED: dict[str, tuple[Case, str]] = {
    "reduce_unknown_axes": (
        Case([op("Shape", "x", "a"), op("ReduceMax", "x,a", "y")]), "reduces over axes that are not constant"
    ),
    "split_unknown_length": (Case([op("Split", "x", "y0,y1", axis=0, num_outputs=2)]), "axis of unknown length"),
    "scatter_add": (
        Case([op("ScatterND", "x,i,u", reduction="add")], {"i": ints(1, 0).reshape(1, 2), "u": floats(1, 5, 7)}),
        "reduces while it scatters",
    ),
    "scatter_max": (
        Case([op("ScatterND", "x,i,u", reduction="max")], {"i": ints(1, 0).reshape(1, 2), "u": floats(1, 5, 7)}),
        "takes the max while it scatters",
    ),
    "grid_sample": (Case([op("GridSample", "x,g")], {"g": floats(2, 5, 7, 2)}),
                     ": this form of GridSample"),
    "bits": (
        Case([op("Cast", "x", "i", to=TensorProto.INT64), op("BitwiseXor", "i,i", "y")]), "this form of BitwiseXor"
    ),
    "bits_of_int8": (
        Case([op("Cast", "x", "i", to=TensorProto.INT8), op("BitwiseNot", "i", "y")]), "inverts the bits of a type"
    ),
    "aspect": (
        Case([op("Resize", "x,,,s", keep_aspect_ratio_policy="not_larger")], {"s": ints(2, 3, 9, 9)}), "aspect ratio"
    ),
    "volume": (
        Case([op("GridSample", "x,g")], {"g": floats(2, 5, 7, 3, 3)}, shape=(2, 3, 2, 5, 7)), "samples volumes"
    ),
    "regions": (
        Case([op("RoiAlign", "x,r,i")], {"r": floats(1, 4), "i": ints(0)}), "aligns regions to pixel centres"
    ),
    "norm_in_training": (
        Case([op("BatchNormalization", "x,g,g,g,g", "y,m,v", training_mode=1)], {"g": floats(3)}),
        "normalizes with statistics of the batch",
    ),
    "fold_to_unknown": (
        Case([op("Shape", "x", "s"), op("Col2Im", "c,s,k", "y")], {"k": ints(1, 1), "c": floats(2, 3, 35)}),
        "folds to a size that is not constant",
    ),
    "pool_ceil": (Case([op("LpPool", kernel_shape=[2, 2], ceil_mode=1)]), "this form of LpPool"),
    "resize_antialias": (
        Case([op("Resize", "x,,s", mode="linear", antialias=1)], {"s": np.array([1, 1, 0.5, 0.5], np.float32)}),
        "antialias",
    ),
    "pad_unknown": (
        Case([op("Shape", "x", "a"), op("Pad", "x,p,,a", "y")], {"p": ints(1, 1, 1, 1, 0, 0, 0, 0)}), "not constant"
    ),
    "reshape_empty": (Case([op("Reshape", "x,s", allowzero=1)], {"s": ints(0, 4)}, shape=(0, 7)), "empty tensor"),
}  # fmt: skip


# Lowest opset that allows each graph of `REFUSED`, including operators that no rule covers.
NEEDS: dict[str, int] = {
    "reduce_unknown_axes": 18, "split_unknown_length": 18, "scatter_add": 16, "scatter_max": 18, "resize_antialias": 18,
    "pad_unknown": 18, "reshape_empty": 14, "grid_sample": 16, "pool_ceil": 18, "bits": 18, "bits_of_int8": 18,
    "aspect": 18, "volume": 20, "regions": 16, "norm_in_training": 14, "fold_to_unknown": 18,
}  # fmt: skip
