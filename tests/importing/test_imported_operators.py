"""Tests of imported operators against ONNX Runtime, in forms of opsets 9 to 21 and of com.microsoft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnx import helper
from onnx_models import check, save

_RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    """Returns normally distributed values."""
    return _RANDOM.normal(0, 1, shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray[Any, Any]:
    """Returns values between 0.1 and 2."""
    return _RANDOM.uniform(0.1, 2, shape).astype(np.float32)


class Case(NamedTuple):
    """A node to test.

    Attributes:
        operator: its type.
        inputs: its inputs by position; None for a constant or an optional input that is left out.
        constants: its constant inputs, by position.
        attributes: its attributes.
        opset: the opset of `domain`.
        outputs: number of outputs.
        domain: its domain; "" for the standard operators.
    """

    operator: str
    inputs: list[Any]
    constants: Mapping[int, Any] = MappingProxyType({})
    attributes: Mapping[str, Any] = MappingProxyType({})
    opset: int = 17
    outputs: int = 1
    domain: str = ""


X = floats(2, 4, 6, 5)
UNARY = ["Abs", "Atan", "Ceil", "Cos", "Erf", "Exp", "Floor", "HardSwish", "Neg", "Relu", "Round", "Sigmoid", "Sign",
         "Sin", "Sinh", "Cosh", "Asinh", "Softplus", "Softsign", "Tan", "Tanh", "Identity", "Elu", "Celu", "Selu",
         "LeakyRelu", "HardSigmoid", "ThresholdedRelu", "Shrink", "IsNaN"]  # fmt: skip
BINARY = [
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Max",
    "Min",
    "Greater",
    "Less",
    "GreaterOrEqual",
    "LessOrEqual",
    "Equal",
]
REDUCTIONS = ["ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd",
              "ReduceLogSumExp"]  # fmt: skip
IMAGE = floats(2, 4, 9, 8)

CASES = [
    *(Case(name, [X]) for name in UNARY),
    *(Case(name, [X, floats(4, 1, 5)]) for name in BINARY),
    *(Case(name, [X], {1: floats(4, 1, 1)}) for name in BINARY[:6]),
    *(Case(name, [X], {1: np.float32(1.5)}) for name in BINARY),
    Case("Sub", [None, X], {0: np.float32(1.0)}),
    Case("Div", [None, positive(3, 4)], {0: np.float32(2.0)}),
    Case("Div", [np.array([7, -7, 9], np.int64), np.array([2, 2, -4], np.int64)]),
    Case("Mod", [np.array([7, -7, 9], np.int64), np.array([2, 3, -4], np.int64)]),
    Case("Mod", [X, positive(5)], {}, {"fmod": 1}),
    *(Case(name, [positive(3, 4)]) for name in ("Sqrt", "Log", "Reciprocal")),
    *(Case("Pow", [positive(3, 4)], {1: np.float32(p)}) for p in (2.0, 0.5, 3.0, -1.5)),
    Case("Pow", [positive(3, 4), floats(3, 4)]),
    Case("And", [X > 0, X > 1]),
    Case("Not", [X > 0]),
    Case("Sum", [X, X * 2, X]),
    Case("Mean", [X, X * 2]),
    Case("Where", [X > 0, X, floats(5)]),
    Case("Where", [X > 0], {1: np.float32(0), 2: np.float32(-np.inf)}),
    Case("Clip", [X], {}, {"min": -0.5, "max": 0.5}, 10),
    Case("Clip", [X], {1: np.float32(0), 2: np.float32(6)}),
    Case("Clip", [X], {1: np.float32(-0.3)}),
    Case("Clip", [X, None, None], {1: np.float32(0), 2: np.float32(np.inf)}),
    Case("HardSigmoid", [X], {}, {"alpha": 1 / 6, "beta": 0.5}),
    Case("PRelu", [X], {1: floats(4, 1, 1)}),
    Case("PRelu", [X], {1: floats(1)}),
    Case("PRelu", [X], {1: floats(4, 6, 5)}),
    Case("Gelu", [X], {}, {"approximate": "tanh"}, 20),
    Case("Gelu", [X], {}, {}, 1, 1, "com.microsoft"),
    Case("FastGelu", [X], {1: floats(5)}, {}, 1, 1, "com.microsoft"),
    Case("BiasGelu", [X], {1: floats(5)}, {}, 1, 1, "com.microsoft"),
    Case("QuickGelu", [X], {}, {"alpha": 1.702}, 1, 1, "com.microsoft"),
    Case("Cast", [X * 3], {}, {"to": 7}),
    Case("Cast", [X > 0], {}, {"to": 1}),
    *(Case(name, [X], {}, {"axes": [1, 2], "keepdims": keep}) for name in REDUCTIONS for keep in (0, 1)),
    *(Case(name, [X], {}, {}) for name in REDUCTIONS[:3]),
    Case("ReduceMean", [X], {}, {"axes": [2, 3]}),
    Case("ReduceMean", [X], {}, {"axes": [-1, -2], "keepdims": 0}),
    Case("ReduceMean", [X], {1: np.array([1])}, {}, 18),
    Case("ReduceSum", [X], {1: np.array([0, -1])}),
    Case("ReduceSum", [X], {}, {"noop_with_empty_axes": 1}),
    Case("ReduceSum", [X], {}, {"axes": [1]}, 11),
    Case("ArgMax", [X], {}, {"axis": 1}),
    Case("ArgMin", [X], {}, {"axis": -1, "keepdims": 0}),
    Case("ArgMax", [np.ones((2, 3), np.float32)], {}, {"axis": 1, "select_last_index": 1}),
    Case("TopK", [X], {1: np.array([3])}, {"axis": -1}, 17, 2),
    Case("TopK", [X], {1: np.array([2])}, {"axis": 1, "largest": 0}, 17, 2),
    *(Case("CumSum", [X], {1: np.array(2)}, {"exclusive": e, "reverse": r}) for e in (0, 1) for r in (0, 1)),
    *(Case(n, [X], {}, {"axis": axis}, opset)
      for n in ("Softmax", "LogSoftmax") for axis in (1, 3) for opset in (11, 17)),
    Case("Hardmax", [X], {}, {"axis": 1}),
    Case("LpNormalization", [X], {}, {"axis": 1, "p": 2}),
    Case("Reshape", [X], {1: np.array([0, -1, 5])}),
    Case("Flatten", [X], {}, {"axis": 2}),
    Case("Flatten", [X], {}, {"axis": -1}),
    Case("Transpose", [X], {}, {"perm": [0, 2, 3, 1]}),
    Case("Transpose", [X]),
    Case("Squeeze", [floats(1, 3, 1)], {}, {"axes": [0, 2]}, 11),
    Case("Squeeze", [floats(1, 3, 1)], {1: np.array([-1])}),
    Case("Squeeze", [floats(1, 3, 1)]),
    Case("Unsqueeze", [X], {}, {"axes": [0, 3]}, 11),
    Case("Unsqueeze", [X], {1: np.array([-1, 1])}),
    Case("Concat", [X, X * 2], {2: floats(2, 1, 6, 5)}, {"axis": 1}),
    Case("Split", [X], {}, {"axis": 1, "split": [1, 3]}, 11, 2),
    Case("Split", [X], {1: np.array([2, 4])}, {"axis": 2}, 17, 2),
    Case("Split", [X], {}, {"axis": 3, "num_outputs": 2}, 18, 2),
    Case("Slice", [X], {}, {"starts": [1, -3], "ends": [9999, -1], "axes": [1, 2]}, 9),
    Case("Slice", [X], {1: np.array([0, 4]), 2: np.array([9999, -9999]), 3: np.array([1, 3]), 4: np.array([2, -1])}),
    Case("Slice", [X], {1: np.array([-2]), 2: np.array([0]), 3: np.array([3]), 4: np.array([-2])}),
    Case("Gather", [X], {1: np.array([2, -1])}, {"axis": 1}),
    Case("Gather", [X], {1: np.array(1)}, {"axis": 2}),
    Case("Gather", [X], {1: np.array([[0, 1], [2, 3]])}, {"axis": 1}),
    Case("Gather", [None, np.array([[1, 2], [0, 4]])], {0: floats(5, 7)}),
    Case("Gather", [None, np.array([[1, 2], [0, 4]])], {0: floats(5, 7, 2)}),
    Case("GatherElements", [X, np.array(_RANDOM.integers(-4, 4, X.shape))], {}, {"axis": 1}),
    Case("GatherND", [X], {1: np.array([[0, 1], [1, 3]])}),
    Case("GatherND", [X, np.array([[1], [3]])], {}, {"batch_dims": 1}),
    Case("ScatterElements", [X, np.array(_RANDOM.integers(0, 1, (2, 1, 6, 5))), floats(2, 1, 6, 5)], {}, {"axis": 1}),
    Case("ScatterND", [X], {1: np.array([[0, 1], [1, 3]]), 2: floats(2, 6, 5)}),
    Case("OneHot", [np.array([0, 2, -1])], {1: np.array(4), 2: np.array([0.5, 2.0], np.float32)}),
    Case("Expand", [floats(4, 1, 5)], {1: np.array([2, 1, 6, 1])}),
    Case("Tile", [floats(2, 3)], {1: np.array([2, 3])}),
    *(Case("Pad", [X], {1: np.array([0, 0, 1, 2, 0, 0, 3, 0])}, {"mode": m}) for m in ("constant", "reflect", "edge")),
    Case("Pad", [X], {1: np.array([1, 0, 0, 0, 0, 2, 0, 0])}, {"mode": "edge"}),
    Case("Pad", [X], {1: np.array([0, 0, -1, 0, 0, 0, 2, 1]), 2: np.float32(1.5)}),
    Case("Pad", [X], {}, {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "value": 2.0}, 10),
    Case("Pad", [X, None, None, None], {1: np.array([1, 2]), 3: np.array([3])}, {}, 18),
    Case("DepthToSpace", [floats(2, 8, 3, 3)], {}, {"blocksize": 2}),
    Case("DepthToSpace", [floats(2, 8, 3, 3)], {}, {"blocksize": 2, "mode": "CRD"}),
    Case("SpaceToDepth", [floats(2, 3, 4, 6)], {}, {"blocksize": 2}),
    Case("Trilu", [X], {1: np.array(1)}, {"upper": 0}),
    Case("ReverseSequence", [floats(5, 3, 2), np.array([2, 5, 1])]),
    Case("Conv", [IMAGE], {1: floats(6, 4, 3, 3), 2: floats(6)}, {"pads": [1, 1, 1, 1]}),
    Case("Conv", [IMAGE], {1: floats(6, 2, 3, 2)}, {"group": 2, "strides": [2, 1], "pads": [0, 1, 2, 0]}),
    Case("Conv", [IMAGE], {1: floats(6, 4, 3, 3)}, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    Case("Conv", [IMAGE], {1: floats(6, 4, 2, 2)}, {"auto_pad": "SAME_LOWER"}),
    Case("Conv", [IMAGE], {1: floats(6, 4, 3, 3)}, {"auto_pad": "VALID", "dilations": [2, 2]}),
    Case("Conv", [IMAGE, floats(6, 4, 3, 3)], {2: floats(6)}, {"pads": [0, 1, 1, 1]}),
    Case("Conv", [floats(2, 3, 9)], {1: floats(4, 3, 3)}, {"pads": [2, 0]}),
    Case("Conv", [floats(1, 2, 4, 4, 4)], {1: floats(3, 2, 2, 2, 2), 2: floats(3)}),
    Case("ConvTranspose", [IMAGE], {1: floats(4, 3, 3, 3), 2: floats(6)},
         {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    Case("ConvTranspose", [IMAGE], {1: floats(4, 3, 2, 2)}, {"strides": [2, 2]}),
    Case("ConvTranspose", [IMAGE], {1: floats(4, 3, 3, 3)},
         {"strides": [2, 2], "pads": [0, 1, 1, 0], "output_padding": [1, 0]}),
    Case("ConvTranspose", [IMAGE], {1: floats(4, 3, 3, 3)}, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    Case("Gemm", [floats(3, 5)], {1: floats(5, 7), 2: floats(7)}, {"alpha": 0.5, "beta": 2.0}),
    Case("Gemm", [floats(3, 5)], {1: floats(7, 5)}, {"transB": 1}),
    Case("Gemm", [floats(5, 3)], {1: floats(5, 7), 2: floats(3, 1)}, {"transA": 1}),
    Case("Gemm", [floats(3, 5), floats(5, 2), floats(3, 2)]),
    Case("MatMul", [floats(2, 3, 5)], {1: floats(5, 7)}),
    Case("MatMul", [floats(2, 3, 5), floats(2, 5, 4)]),
    Case("MatMul", [None, floats(5, 4)], {0: floats(2, 3, 5)}),
    Case("MatMul", [floats(3, 5)], {1: floats(5)}),
    Case("FusedMatMul", [floats(2, 5, 3), floats(2, 4, 5)], {}, {"transA": 1, "transB": 1, "alpha": 0.5}, 1, 1,
         "com.microsoft"),
    Case("Einsum", [floats(2, 3, 4), floats(2, 4, 5)], {}, {"equation": "bij,bjk->bki"}),
    Case("BatchNormalization", [IMAGE], {i: positive(4) for i in (1, 2, 3, 4)}, {"epsilon": 1e-3}),
    Case("BatchNormalization", [floats(3, 4)], {i: positive(4) for i in (1, 2, 3, 4)}),
    Case("InstanceNormalization", [IMAGE], {1: floats(4), 2: floats(4)}),
    Case("LayerNormalization", [X], {1: floats(5), 2: floats(5)}),
    Case("LayerNormalization", [X], {1: floats(6, 5)}, {"axis": 2}),
    Case("GroupNormalization", [IMAGE], {1: floats(4), 2: floats(4)}, {"num_groups": 2}, 21),
    Case("LRN", [IMAGE], {}, {"size": 3, "alpha": 0.1}),
    Case("MeanVarianceNormalization", [IMAGE]),
    Case("SkipLayerNormalization", [floats(2, 3, 8), floats(2, 3, 8)], {2: floats(8), 3: floats(8)},
         {"epsilon": 1e-5}, 1, 1, "com.microsoft"),
    *(Case(pool, [IMAGE], {}, {"kernel_shape": [3, 3], "strides": [2, 2], **more})
      for pool in ("MaxPool", "AveragePool")
      for more in ({}, {"pads": [1, 1, 1, 1]}, {"pads": [0, 0, 1, 1]}, {"pads": [1, 0, 0, 1]},
                   {"auto_pad": "SAME_UPPER"})),
    Case("MaxPool", [IMAGE], {}, {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    Case("MaxPool", [IMAGE], {}, {"kernel_shape": [2, 2], "dilations": [2, 2]}),
    Case("AveragePool", [IMAGE], {}, {"kernel_shape": [3, 3], "pads": [1, 0, 0, 1], "count_include_pad": 1}),
    Case("GlobalAveragePool", [IMAGE]),
    Case("GlobalAveragePool", [floats(2, 3, 7)]),
    Case("GlobalMaxPool", [IMAGE]),
    *(Case("Resize", [IMAGE, None, None], {2: np.array([1, 1, s, s], np.float32)},
           {"mode": mode, "coordinate_transformation_mode": c, "nearest_mode": n})
      for s in (2.0, 1.5, 0.5)
      for mode, c, n in (("nearest", "asymmetric", "floor"), ("nearest", "half_pixel", "round_prefer_floor"),
                         ("nearest", "half_pixel", "round_prefer_ceil"), ("linear", "half_pixel", "floor"),
                         ("linear", "asymmetric", "floor"), ("linear", "align_corners", "floor"),
                         ("linear", "pytorch_half_pixel", "floor"), ("cubic", "half_pixel", "floor"))),
    Case("Resize", [IMAGE, None, None, None], {3: np.array([2, 4, 20, 11])}, {"mode": "linear"}),
    Case("Resize", [IMAGE], {1: np.array([1, 1, 2, 2], np.float32)}, {"mode": "nearest"}, 10),
    Case("Upsample", [IMAGE], {1: np.array([1, 1, 2, 3], np.float32)}, {"mode": "linear"}, 9),
    *(Case(kind, [floats(5, 2, 3)],
           {1: floats(d, g * 4, 3), 2: floats(d, g * 4, 4), 3: floats(d, 2 * g * 4)},
           {"hidden_size": 4, "direction": direction, **more}, 17, 3 if kind == "LSTM" else 2)
      for kind, g, more in (("LSTM", 4, {}), ("GRU", 3, {"linear_before_reset": 1}), ("RNN", 1, {}))
      for direction, d in (("forward", 1), ("reverse", 1), ("bidirectional", 2))),
    Case("LSTM", [floats(5, 2, 3), None, None, None, None, floats(1, 2, 4), floats(1, 2, 4)],
         {1: floats(1, 16, 3), 2: floats(1, 16, 4)}, {"hidden_size": 4}, 17, 3),
]  # fmt: skip


def _name(case: Case) -> str:
    return f"{case.operator}-{case.opset}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_an_operator_computes_what_onnxruntime_computes(case: Case, tmp_path: Path) -> None:
    count = max([len(case.inputs), *(place + 1 for place in case.constants)])
    names = [f"input_{i}" for i in range(count)]
    feeds = {names[i]: value for i, value in enumerate(case.inputs) if value is not None}
    # A position that is neither an input nor a constant is an optional input that is left out.
    given = [name if name in feeds or i in case.constants else "" for i, name in enumerate(names)]
    outputs = [f"output_{i}" for i in range(case.outputs)]
    node = helper.make_node(case.operator, given, outputs, "node", domain=case.domain, **case.attributes)
    imports = [helper.make_opsetid(case.domain, case.opset)] if case.domain else []
    constants = {names[place]: value for place, value in case.constants.items()}
    path = save(
        tmp_path / "m.onnx",
        [node],
        feeds,
        outputs,
        constants,
        opset=17 if imports else case.opset,
        imports=imports,
    )
    check(path, feeds)
