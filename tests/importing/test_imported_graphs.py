"""Tests of importing the forms in which tools write graphs: names, types, weights, branches, functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx_models import BOOL, FLOAT, INT64, Array, check, imported, in_onnxruntime, save

from qatkit.importing import import_onnx
from qatkit.importing.program import Operator
from qatkit_verify.errors import ConfigError

_RANDOM = np.random.default_rng(1)


def floats(*shape: int) -> Array:
    """Returns normally distributed values."""
    return _RANDOM.normal(0, 1, shape).astype(np.float32)


X = floats(2, 3, 8, 8)
WEIGHT, BIAS = floats(4, 3, 3, 3), floats(4)


def node(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    """Returns a node without a name."""
    return helper.make_node(operator, inputs, outputs, **attributes)


NAMES = [["1", "2", "3"], ["a:0", "b:0", "c:0"], ['{"k": 1}', "x y", "z'q"], ["conv", "conv.bias", "conv.bias.x"],
         ["forward", "training", "inputs"], ["/a/b", "/a/b/c", "/a"], ["..", "a..b", ".a"],
         ["", "", ""], ["conv.bias", "conv", "conv_bias"],
         ["x_QuantizeLinear_Output", "x_DequantizeLinear", "x_scale"]]  # fmt: skip


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_names_of_any_kind(names: list[str], tmp_path: Path) -> None:
    values = [f"{name or i}" for i, name in enumerate(names)]
    values = values if len(set(values)) == 3 else ["p", "q", "r"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], [values[0]], names[0], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", [values[0]], [values[1]], names[1]),
        helper.make_node("Conv", [values[1], "v"], [values[2]], names[2]),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": X}, [values[2]], {"w": WEIGHT, "v": floats(2, 4, 1, 1)})
    check(path, {"x": X})
    model = import_onnx(path)
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 2


def test_a_nodes_name_is_the_path_of_its_module(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "/layer1/layer1.0/conv/Conv"),
        helper.make_node("Add", ["a", "a"], ["y"], "/layer1/Add"),
    ]
    model = import_onnx(save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"], {"w": WEIGHT}))
    assert isinstance(model.get_submodule("/layer1/layer1.0/conv/Conv"), torch.nn.Conv2d)
    assert model.get_submodule("/layer1/Add") is not None


def test_inputs_and_outputs_keep_their_names_and_order(tmp_path: Path) -> None:
    nodes = [node("Sub", ["b:0", "a:0"], ["second"]), node("Neg", ["a:0"], ["first"])]
    path = save(tmp_path / "m.onnx", nodes, {"a:0": X, "b:0": X}, ["second", "first", "b:0"])
    model = import_onnx(path)
    assert (model.inputs, model.outputs) == (("a:0", "b:0"), ("second", "first", "b:0"))
    check(path, {"a:0": X, "b:0": X * 2})


def test_unsorted_nodes(tmp_path: Path) -> None:
    nodes = [node("Relu", ["b"], ["y"]), node("Neg", ["a"], ["b"]), node("Abs", ["x"], ["a"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"])
    assert np.array_equal(imported(path, {"x": X})[0], np.maximum(-np.abs(X), 0))


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 13, 15, 17, 20])
def test_initializers_that_are_inputs_of_ir_3(opset: int, tmp_path: Path) -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["y"])]
    inputs = {"x": X, "w": WEIGHT, "b": BIAS}
    path = save(
        tmp_path / "m.onnx", nodes, inputs, ["y"], {"w": WEIGHT, "b": BIAS}, opset=opset, ir_version=3
    )
    assert import_onnx(path).inputs == ("x",)
    check(path, {"x": X})


def _constant_node(value: Array) -> onnx.NodeProto:
    return node("Constant", [], ["w"], value=numpy_helper.from_array(value))


HELD: dict[str, Callable[[], tuple[list[onnx.NodeProto], dict[str, Array]]]] = {
    "Constant": lambda: ([_constant_node(WEIGHT)], {}),
    "Identity": lambda: ([node("Identity", ["v"], ["w"])], {"v": WEIGHT}),
    "Cast": lambda: ([node("Cast", ["v"], ["w"], to=FLOAT)], {"v": WEIGHT.astype(np.float16)}),
    "Reshape": lambda: ([node("Reshape", ["v", "s"], ["w"])], {"v": WEIGHT.reshape(-1), "s": np.array([4, 3, 3, 3])}),
    "Transpose": lambda: ([node("Transpose", ["v"], ["w"], perm=[3, 2, 0, 1])],
                          {"v": np.ascontiguousarray(WEIGHT.transpose(2, 3, 1, 0))}),
    "DequantizeLinear": lambda: ([node("DequantizeLinear", ["v", "s", "z"], ["w"], axis=0)],
                                 {"v": np.arange(-54, 54, dtype=np.int8).reshape(4, 3, 3, 3),
                                  "s": np.array([0.1, 0.2, 0.3, 0.4], np.float32), "z": np.zeros(4, np.int8)}),
    "arithmetic": lambda: ([node("Mul", ["v", "s"], ["w"])], {"v": WEIGHT, "s": np.full((4, 1, 1, 1), 2, np.float32)}),
}  # fmt: skip


@pytest.mark.parametrize("held", HELD)
def test_a_weight_is_found_however_it_is_held(held: str, tmp_path: Path) -> None:
    before, constants = HELD[held]()
    path = save(
        tmp_path / "m.onnx",
        [*before, node("Conv", ["x", "w", "b"], ["y"])],
        {"x": X},
        ["y"],
        {**constants, "b": BIAS},
    )
    check(path, {"x": X})
    convolutions = [module for module in import_onnx(path).modules() if isinstance(module, torch.nn.Conv2d)]
    assert [one.weight.shape for one in convolutions] == [WEIGHT.shape]


def test_weights_and_biases_shared_by_several_nodes(tmp_path: Path) -> None:
    weight = floats(3, 3, 3, 3)
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"], pads=[1, 1, 1, 1]),
        node("Conv", ["a", "w", "b"], ["y"], pads=[1, 1, 1, 1]),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"], {"w": weight, "b": floats(3)})
    check(path, {"x": X})
    one, two = (module for module in import_onnx(path).modules() if isinstance(module, torch.nn.Conv2d))
    assert one.weight is two.weight and one.bias is two.bias


@pytest.mark.parametrize("kind", [np.float16, np.float64], ids=str)
def test_other_floats_are_computed_in_float32(kind: Any, tmp_path: Path) -> None:
    x, weight = floats(2, 5).astype(kind), floats(5, 3).astype(kind)
    path = save(tmp_path / "m.onnx", [node("MatMul", ["x", "w"], ["y"])], {"x": x}, ["y"], {"w": weight})
    (found,) = imported(path, {"x": x})
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_integers_and_booleans_as_inputs(tmp_path: Path) -> None:
    ids, mask = np.array([[1, 3, 0]]), np.array([[True, False, True]])
    nodes = [node("Gather", ["table", "ids"], ["e"]), node("Cast", ["mask"], ["m"], to=FLOAT),
             node("Unsqueeze", ["m", "axes"], ["u"]), node("Mul", ["e", "u"], ["y"])]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, {"ids": (INT64, ["n", 3]), "mask": (BOOL, ["n", 3])}, ["y"],
                {"table": floats(5, 4), "axes": np.array([-1])})  # fmt: skip
    check(path, {"ids": ids, "mask": mask})
    assert any(isinstance(module, torch.nn.Embedding) for module in import_onnx(path).modules())


def _function() -> onnx.FunctionProto:
    body = [node("Mul", ["a", "a"], ["s"]), node("Add", ["s", "a"], ["r"])]
    return helper.make_function("mine", "Curve", ["a"], ["r"], body, [helper.make_opsetid("", 17)])


def test_local_functions(tmp_path: Path) -> None:
    nodes = [node("Curve", ["x"], ["t"], domain="mine"), node("Curve", ["t"], ["y"], domain="mine")]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        {"x": X},
        ["y"],
        functions=[_function()],
        imports=[helper.make_opsetid("mine", 1)],
    )
    check(path, {"x": X})


def _branch(name: str, made: list[onnx.NodeProto], output: str) -> onnx.GraphProto:
    return helper.make_graph(made, name, [], [helper.make_tensor_value_info(output, FLOAT, None)])


def _if(condition: str, output: str = "y") -> onnx.NodeProto:
    return node("If", [condition], [output], then_branch=_branch("then", [node("Neg", ["x"], ["p"])], "p"),
                else_branch=_branch("else", [node("Abs", ["x"], ["a"]), node("Sqrt", ["a"], ["q"])], "q"))  # fmt: skip


@pytest.mark.parametrize("value", [True, False])
def test_an_if_with_a_constant_condition(value: bool, tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [_if("c")], {"x": X}, ["y"], {"c": np.array(value)})
    check(path, {"x": X})


@pytest.mark.parametrize("rate", [8000, 16000])
def test_a_fixed_input_decides_an_if(rate: int, tmp_path: Path) -> None:
    nodes = [node("Equal", ["sr", "k"], ["c"]), _if("c")]
    path = save(tmp_path / "m.onnx", nodes, {"x": X, "sr": (INT64, [])}, ["y"], {"k": np.array(16000)})
    model = import_onnx(path, fixed={"sr": rate})
    assert model.inputs == ("x",)
    check(path, {"x": X}, fixed={"sr": np.array(rate)})


@pytest.mark.parametrize("size", [8, 6])
def test_an_if_that_asks_for_a_size(size: int, tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "three"], ["n"]),
        node("Equal", ["n", "eight"], ["c"]),
        _if("c"),
    ]
    path = save(
        tmp_path / "m.onnx",
        nodes,
        {"x": (FLOAT, ["n", 3, 8, "w"])},
        ["y"],
        {"three": np.array(3), "eight": np.array(8)},
    )
    check(path, {"x": X[..., :size]})


@pytest.mark.parametrize("taken", [True, False])
def test_an_operator_unknown_here_is_refused_where_it_is_run(taken: bool, tmp_path: Path) -> None:
    known = _branch("then", [node("Neg", ["x"], ["p"])], "p")
    unknown = _branch("else", [node("StringNormalizer", ["x"], ["q"])], "q")
    path = save(tmp_path / "m.onnx", [node("If", ["c"], ["y"], then_branch=known, else_branch=unknown)], {"x": X},
                ["y"], {"c": np.array(taken)})  # fmt: skip
    if taken:
        assert np.array_equal(imported(path, {"x": X})[0], -X)
    else:
        with pytest.raises(ConfigError, match="StringNormalizer"):
            imported(path, {"x": X})


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 3, 6, 10), (3, 3, 12, 4)])
def test_shapes_computed_from_dynamic_sizes(shape: tuple[int, ...], tmp_path: Path) -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Slice", ["s", "zero", "two"], ["front"]),
             node("Concat", ["front", "minus"], ["target"], axis=0), node("Reshape", ["x", "target"], ["r"]),
             node("Shape", ["r"], ["t"]), node("ConstantOfShape", ["t"], ["zeros"]),
             node("Add", ["r", "zeros"], ["y"])]  # fmt: skip
    constants = {"zero": np.array([0]), "two": np.array([2]), "minus": np.array([-1])}
    path = save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 3, "h", "w"])}, ["y"], constants)
    check(path, {"x": floats(*shape)})


def test_a_file_of_one_image_takes_several(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Reshape", ["a", "s"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
    ]
    constants = {"w": WEIGHT, "s": np.array([1, -1]), "v": floats(144, 5)}
    path = save(tmp_path / "m.onnx", nodes, {"x": X[:1]}, ["y"], constants)
    (both,) = imported(path, {"x": X})
    one_by_one = np.concatenate([in_onnxruntime(path, {"x": X[i : i + 1]})[0] for i in range(2)])
    np.testing.assert_allclose(both, one_by_one, rtol=1e-4, atol=1e-4)


def test_infinities_in_initializers(tmp_path: Path) -> None:
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
    nodes = [node("Add", ["x", "m"], ["a"]), node("Softmax", ["a"], ["y"], axis=-1)]
    check(save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"], {"m": mask}), {"x": X})


def test_weights_beside_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [node("Conv", ["x", "w"], ["y"])], {"x": X}, ["y"], {"w": WEIGHT})
    model = onnx.load(str(path))
    onnx.save(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    check(path, {"x": X})


def test_outputs_that_are_constants_and_outputs_twice(tmp_path: Path) -> None:
    nodes = [node("Identity", ["c"], ["k"]), node("Neg", ["x"], ["y"]), node("Identity", ["y"], ["z"])]
    check(save(tmp_path / "m.onnx", nodes, {"x": X}, ["k", "y", "z"], {"c": floats(2, 2)}), {"x": X})


def test_optional_inputs_and_outputs_left_out(tmp_path: Path) -> None:
    nodes = [
        node("Clip", ["x", "", "high"], ["c"]),
        node("Dropout", ["c"], ["d", ""]),
        node("Relu", ["d"], ["y"]),
    ]
    check(save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"], {"high": np.array(0.5, np.float32)}), {"x": X})


def test_a_fused_convolution_of_onnxruntime(tmp_path: Path) -> None:
    made = helper.make_node("FusedConv", ["x", "w", "b"], ["y"], domain="com.microsoft", activation="Relu")
    path = save(tmp_path / "m.onnx", [made], {"x": X}, ["y"], {"w": WEIGHT, "b": BIAS},
                imports=[helper.make_opsetid("com.microsoft", 1)])  # fmt: skip
    check(path, {"x": X})


def test_operators_written_in_parts_become_one(tmp_path: Path) -> None:
    nodes = [
        node("Sigmoid", ["x"], ["s"]), node("Mul", ["x", "s"], ["silu"]),
        node("Add", ["silu", "three"], ["a"]), node("Clip", ["a", "zero", "six"], ["c"]),
        node("Mul", ["silu", "c"], ["m"]),
        node("Div", ["m", "six"], ["swish"]),
        node("Div", ["swish", "root"], ["d"]), node("Erf", ["d"], ["e"]), node("Add", ["e", "one"], ["f"]),
        node("Mul", ["swish", "f"], ["g"]), node("Mul", ["g", "half"], ["y"]),
    ]  # fmt: skip
    numbers = {"three": 3, "zero": 0, "six": 6, "root": np.sqrt(2), "one": 1, "half": 0.5}
    path = save(
        tmp_path / "m.onnx", nodes, {"x": X}, ["y"], {k: np.array(v, np.float32) for k, v in numbers.items()}
    )
    check(path, {"x": X})
    operators = [
        module.node.op_type for module in import_onnx(path).modules() if isinstance(module, Operator)
    ]
    assert operators == ["Swish", "HardSwish", "Gelu"]
