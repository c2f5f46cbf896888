"""Tests of files that cannot be imported: one line names the file, the reason and, if known, the node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx_models import FLOAT, Array, save

from qatkit.config.schema import ModelConfig
from qatkit.importing import import_onnx, prove_import
from qatkit.importing.inputs import file_inputs
from qatkit.importing.read import last_opset, read
from qatkit.models.build import build
from qatkit_verify.errors import ConfigError

X: Array = np.ones((1, 2, 4, 4), np.float32)


def _message(path: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as raised:
        import_onnx(path, **settings)  # type: ignore[arg-type]
    message = str(raised.value)
    assert "\n" not in message and str(path) in message
    return message


def test_a_custom_operator(tmp_path: Path) -> None:
    made = helper.make_node("Magic", ["x"], ["y"], "magic", domain="acme")
    path = save(tmp_path / "m.onnx", [made], {"x": X}, ["y"], imports=[helper.make_opsetid("acme", 1)])
    assert "node 'magic': the operator acme.Magic has no PyTorch equivalent" in _message(path)


def test_a_file_that_is_quantized_already(tmp_path: Path) -> None:
    made = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"], "q")
    path = save(tmp_path / "m.onnx", [made], {"x": X}, ["y", "s", "z"])
    assert "is quantized already" in _message(path)


def test_random_numbers(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["r"], "noise"),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    assert "draws random numbers" in _message(save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"]))


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x07" + bytes(64)])
def test_a_damaged_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    _message(path)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    assert "a float ONNX file that exists" in _message(tmp_path / "m.onnx")


def test_external_data_that_is_missing(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "w"], ["y"])], {"x": X}, ["y"], {"w": X})
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    assert "the file w.bin with its external data is missing" in _message(path)


def test_a_fixed_value_of_no_input_and_of_another_shape(tmp_path: Path) -> None:
    made = helper.make_node("Mul", ["x", "sr"], ["y"])
    path = save(tmp_path / "m.onnx", [made], {"x": X, "sr": (FLOAT, [])}, ["y"])
    with pytest.raises(ConfigError, match=r"model\.kwargs\.fix=rate: expected an input of m\.onnx \(x, sr\)"):
        import_onnx(path, fixed={"rate": 1})
    for value in ([1, 2], "fast", [[1], [2, 3]]):
        expected = r"a value of shape \[\] and type float32 for input 'sr'"
        with pytest.raises(ConfigError, match=rf"model\.kwargs\.fix=sr: .*: expected {expected}"):
            import_onnx(path, fixed={"sr": value})


def test_an_integer_input_is_not_fixed_to_a_fraction(tmp_path: Path) -> None:
    cast = helper.make_node("Cast", ["sr"], ["rate"], to=FLOAT)
    path = save(tmp_path / "m.onnx", [cast, helper.make_node("Mul", ["x", "rate"], ["y"])],
                {"x": X, "sr": (onnx.TensorProto.INT64, [])}, ["y"])  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"model\.kwargs\.fix=sr: 16000\.5: expected a value .* and type int64"
    ):
        import_onnx(path, fixed={"sr": 16000.5})
    assert import_onnx(path, fixed={"sr": 16000.0}) is not None


def test_constants_that_an_operator_does_not_take(tmp_path: Path) -> None:
    constants = {"a": np.ones((2, 3), np.float32), "b": np.ones((4, 5), np.float32)}
    folded = [
        helper.make_node("MatMul", ["a", "b"], ["c"], "folded"),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    assert "node 'folded': " in _message(save(tmp_path / "m.onnx", folded, {"x": X}, ["y"], constants))
    groups = [helper.make_node("Conv", ["x", "k"], ["y"], "groups", group=2)]
    kernel = {"k": np.ones((3, 1, 1, 1), np.float32)}
    assert "node 'groups': " in _message(save(tmp_path / "n.onnx", groups, {"x": X}, ["y"], kernel))


def test_an_input_that_is_missing(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Add", ["a", "b"], ["y"])], {"a": X, "b": X}, ["y"])
    with pytest.raises(ConfigError, match=r"inputs=a: expected a, b; 'b' is missing"):
        import_onnx(path)(a=torch.ones(1))


def test_external_data_that_ends_too_early(tmp_path: Path) -> None:
    path = _beside(tmp_path, [helper.make_node("Add", ["x", "w"], ["y"])], {"w": X})
    (tmp_path / "w.bin").write_bytes(bytes(100))
    assert "the file w.bin with its external data ends before" in _message(path)


def test_external_data_of_a_branch_that_is_missing(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(X, "w")
    branches = {
        name: helper.make_graph(
            [helper.make_node("Add", ["x", "w"], ["r"])],
            name,
            [],
            [helper.make_empty_tensor_value_info("r")],
            [weight],
        )
        for name in ("then_branch", "else_branch")
    }
    path = _beside(tmp_path, [helper.make_node("If", ["c"], ["y"], **branches)], {"c": np.array(True)})
    (tmp_path / "w.bin").unlink()
    assert "the file w.bin with its external data is missing" in _message(path)


def _beside(folder: Path, nodes: list[onnx.NodeProto], constants: dict[str, Array]) -> Path:
    """Writes an ONNX file whose weights are in w.bin."""
    path = save(folder / "m.onnx", nodes, {"x": X}, ["y"], constants)
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


def test_a_value_that_nothing_makes(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "lost"], ["y"], "sum")], {"x": X}, ["y"])
    assert "node 'sum' reads 'lost', which is neither an input nor computed by a node" in _message(path)


def test_an_output_that_nothing_makes(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Neg", ["x"], ["y"])], {"x": X}, ["y", "lost"])
    assert "output 'lost' is neither an input nor computed by a node" in _message(path)


def test_two_nodes_that_make_one_value(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["y"], "one"), helper.make_node("Abs", ["x"], ["y"], "two")]
    assert "'y'" in _message(save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"]))


def test_two_outputs_of_one_name(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Neg", ["x"], ["y"])], {"x": X}, ["y", "y"])
    assert "two outputs of the file are called 'y'" in _message(path)


def test_nodes_in_a_circle(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"], "one"), helper.make_node("Neg", ["a"], ["b"], "two")]
    assert "the graph has a cycle: node " in _message(save(tmp_path / "m.onnx", nodes, {"x": X}, ["b"]))


@pytest.mark.parametrize("opset", [1, 6, 99])
def test_an_opset_that_the_tables_lack(opset: int, tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": X}, ["y"], opset=opset)
    assert f"of opset 7 to {last_opset()}; this one has opset {opset}" in _message(path)


def test_an_operator_that_the_standard_lacks(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Magic", ["x"], ["y"], "magic")], {"x": X}, ["y"])
    message = _message(path)
    assert "node 'magic': the operator Magic has no PyTorch equivalent" in message
    assert "custom_ops" not in message


@pytest.mark.parametrize("ratio", [0.5, None])
def test_a_dropout_that_drops_at_random(ratio: float | None, tmp_path: Path) -> None:
    given = ["x", "", "train"] if ratio is None else ["x", "ratio", "train"]
    constants: dict[str, Array] = {"train": np.array(True), "ratio": np.array(ratio or 0.5, np.float32)}
    nodes = [helper.make_node("Dropout", given, ["y"], "drop")]
    path = save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"], constants)
    assert "node 'drop': Dropout in training mode draws random numbers" in _message(path)


def test_a_sequence_as_an_output(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.onnx", [helper.make_node("SplitToSequence", ["x"], ["y"], "split")], {"x": X}, ["y"]
    )
    assert "output 'y' is not a tensor of numbers" in _message(path)


def test_an_input_without_a_type(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [helper.make_node("Neg", ["x"], ["y"])], {"x": X}, ["y"])
    model = onnx.load(str(path))
    model.graph.input[0].ClearField("type")
    onnx.save(model, str(path))
    with pytest.raises(ConfigError, match="a file that gives the type and the shape of its input 'x'"):
        file_inputs(path, read(path), ())


def test_nodes_of_one_name(tmp_path: Path) -> None:
    """ONNX Runtime loads no file in which two nodes have the same name."""
    nodes = [helper.make_node("Neg", ["x"], ["a"], "same"), helper.make_node("Abs", ["a"], ["y"], "same")]
    path = save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"])
    with pytest.raises(ConfigError, match="two nodes with same node name") as raised:
        prove_import(import_onnx(path), {"x": X})
    assert "\n" not in str(raised.value)


def test_a_layer_that_onnxruntime_does_not_run(tmp_path: Path) -> None:
    """PyTorch computes an LSTM whose first axis is the batch (layout=1), but ONNX Runtime does not."""
    constants = {"w": np.ones((1, 8, 3), np.float32), "r": np.ones((1, 8, 2), np.float32)}
    nodes = [helper.make_node("LSTM", ["x", "w", "r"], ["y"], "lstm", hidden_size=2, layout=1)]
    feeds = {"x": np.ones((2, 4, 3), np.float32)}
    path = save(tmp_path / "m.onnx", nodes, feeds, ["y"], constants)
    with pytest.raises(ConfigError, match=r"ONNX Runtime .*layout") as raised:
        prove_import(import_onnx(path), feeds)
    assert "\n" not in str(raised.value)


def test_a_part_that_is_quantized_already(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "first"),
        helper.make_node("QuantizeLinear", ["a", "s", "z"], ["q"], "quantize"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], "dequantize"),
    ]
    constants: dict[str, Array] = {"w": np.ones((2, 2, 1, 1), np.float32)}
    constants |= {"s": np.array(0.1, np.float32), "z": np.array(0, np.uint8)}
    message = _message(save(tmp_path / "m.onnx", nodes, {"x": X}, ["y"], constants))
    assert "node 'quantize': QuantizeLinear shows that the model is quantized already" in message


def test_a_fault_of_the_file_is_not_one_of_the_arguments(tmp_path: Path) -> None:
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"], "/Quantize")]
    path = save(tmp_path / "quantized.onnx", nodes, {"x": (FLOAT, ["n", 4])}, ["y"])
    with pytest.raises(
        ConfigError, match=r"^onnx=.*shows that the model is quantized already; give a float model"
    ):
        build(ModelConfig(name=f"onnx/{path}"))
