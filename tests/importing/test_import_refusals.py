"""Files that can't be imported get one sentence that names the file, the node and the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper
from onnx_models import FLOAT, Array, save

from qatkit.importing import import_onnx
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
    assert "node 'magic': the operator acme.Magic has no form in PyTorch" in _message(path)


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
    import onnx

    path = save(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "w"], ["y"])], {"x": X}, ["y"], {"w": X})
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    assert "external data is missing: w.bin" in _message(path)


def test_a_fixed_value_of_no_input_and_of_another_shape(tmp_path: Path) -> None:
    made = helper.make_node("Mul", ["x", "sr"], ["y"])
    path = save(tmp_path / "m.onnx", [made], {"x": X, "sr": (FLOAT, [])}, ["y"])
    with pytest.raises(ConfigError, match=r"onnx\.fix=rate: expected an input of m\.onnx \(x, sr\)"):
        import_onnx(path, fixed={"rate": 1})
    for value in ([1, 2], "fast", [[1], [2, 3]]):
        with pytest.raises(ConfigError, match=r"onnx\.fix=sr: .*: expected a value of type FLOAT and shape"):
            import_onnx(path, fixed={"sr": value})


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
    with pytest.raises(ConfigError, match=r"inputs=a: expected a, b; b is missing"):
        import_onnx(path)(a=torch.ones(1))
