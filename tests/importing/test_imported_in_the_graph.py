"""Tests that an imported file is traced, quantized and exported like any model, at any batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from onnx_models import FLOAT, INT64, Array, save, sqnr

from qatkit import QATModule, export_onnx
from qatkit.graph.nodes import site
from qatkit.graph.trace import trace
from qatkit.importing import import_onnx, prove_import
from qatkit.importing.inputs import file_inputs
from qatkit.importing.read import read
from qatkit_verify.errors import ConfigError

_RANDOM = np.random.default_rng(2)


def floats(*shape: int) -> Array:
    """Returns normally distributed values."""
    return _RANDOM.normal(0, 1, shape).astype(np.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Writes a small network with a residual connection, two inputs, two outputs and any batch size."""
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["a"], "/stem/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["a", "s", "b", "m", "v"], ["n"], "/stem/Norm"),
        helper.make_node("Relu", ["n"], ["r"], "/stem/Relu"),
        helper.make_node("Conv", ["r", "u"], ["c"], "/block/Conv", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "r"], ["d"], "/block/Add"),
        helper.make_node("GlobalAveragePool", ["d"], ["p"], "/head/Pool"),
        helper.make_node("Flatten", ["p"], ["f"], "/head/Flatten"),
        helper.make_node("Concat", ["f", "state"], ["g"], "/head/Concat", axis=1),
        helper.make_node("Gemm", ["g", "h"], ["next"], "/head/Gemm"),
        helper.make_node("Softmax", ["next"], ["y"], "/head/Softmax"),
    ]
    constants = {"w": floats(8, 3, 3, 3), "u": floats(8, 8, 3, 3), "h": floats(12, 4)}
    constants |= {name: _RANDOM.uniform(0.5, 1.5, 8).astype(np.float32) for name in "sbmv"}
    inputs = {"image": (FLOAT, ["n", 3, 8, 8]), "state": (FLOAT, ["n", 4])}
    return save(tmp_path / "m.onnx", nodes, inputs, ["next", "y"], constants)


def _feeds(count: int) -> dict[str, torch.Tensor]:
    return {"image": torch.from_numpy(floats(count, 3, 8, 8)), "state": torch.from_numpy(floats(count, 4))}


def test_sites_are_the_names_of_nodes(file: Path) -> None:
    graph = trace(import_onnx(file), _feeds(2)).graph
    sites = {site(node) for node in graph.nodes}
    assert {"/stem/Conv", "/stem/Norm", "/block/Add", "/head/Concat", "/head/Gemm", "/head/Softmax"} <= sites


def test_ptq_of_a_file_matches_its_simulation(file: Path, tmp_path: Path) -> None:
    model = import_onnx(file)
    module = QATModule(model, _feeds(2))
    module.calibrate([_feeds(8) for _ in range(4)])
    module.eval()
    feeds = _feeds(5)
    with torch.no_grad():
        exact = model(**feeds)
        simulated = module.graph(*(feeds[name] for name in model.inputs))
    export_onnx(module.convert().graph, feeds, tmp_path / "int8.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "int8.onnx"))
    assert [one.name for one in session.get_outputs()] == ["next", "y"]
    found = session.run(None, {name: value.numpy() for name, value in feeds.items()})
    assert isinstance(exact, dict)
    assert sqnr(exact["next"].numpy(), found[0]) > 25
    for a, b in zip(simulated, found, strict=True):
        np.testing.assert_allclose(a.numpy(), b, atol=0.02 * float(a.abs().max()))


def test_a_proof_compares_with_onnxruntime(file: Path) -> None:
    model = import_onnx(file)
    feeds = {name: value.numpy() for name, value in _feeds(3).items()}
    assert min(prove_import(model, feeds).values()) > 110
    with torch.no_grad():
        model.get_submodule("/block/Conv").get_parameter("weight").mul_(1.01)
    with pytest.raises(
        ConfigError,
        match=r"node '/block/Conv' differs from ONNX Runtime \(its output has an SQNR of 4\d\.\d dB\)",
    ):
        prove_import(model, feeds)


@pytest.mark.parametrize("name", ["batch", None])
def test_the_batch_axis_is_where_the_file_says(name: str | None, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("ReduceSum", ["state"], ["s"], keepdims=0, axes=[0]),
        helper.make_node("Add", ["a", "s"], ["y"]),
    ]
    inputs = {"x": (FLOAT, [name, 6]), "state": (FLOAT, [2, name, 4])}
    path = save(tmp_path / "m.onnx", nodes, inputs, ["y"], {"w": floats(6, 4)}, opset=11)
    model = import_onnx(path)
    assert model.batch_axes == {"x": 0, "state": 1}
    module = QATModule(model, {"x": torch.ones(2, 6), "state": torch.ones(2, 2, 4)})
    assert module.graph.meta["batch_axes"] == (0, 1)
    found = module.eval().graph(torch.ones(5, 6), torch.ones(2, 5, 4))
    assert found.shape == (5, 4)


def test_a_file_that_enlarges_rounding_is_judged_in_float64(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["y"], "/Conv"),
        helper.make_node("BatchNormalization", ["y", "scale", "b", "b", "scale"], ["z"], "/Norm"),
        helper.make_node("Sin", ["z"], ["s"], "/Sin"),
    ]
    constants = {"w": floats(4, 3, 3, 3), "b": floats(4), "scale": np.full(4, 3e7, np.float32)}
    path = save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 3, 8, 8])}, ["s"], constants)
    module = QATModule(import_onnx(path), torch.randn(2, 3, 8, 8))
    assert module.eval().graph(torch.randn(3, 3, 8, 8)).shape == (3, 4, 6, 6)


def test_a_node_that_fails_is_named_with_the_reason(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "/MatMul")]
    path = save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", "k"])}, ["y"], {"w": floats(6, 4)})
    with pytest.raises(ConfigError, match=r"RuntimeError: .* multiplied .*, in node '/MatMul' of .*m\.onnx"):
        QATModule(import_onnx(path), torch.ones(2, 5))


def test_an_open_axis_behind_one_sample_is_no_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["audio", "gain"], ["y"], "/Mul")]
    inputs = {"audio": (FLOAT, [1, "samples"]), "gain": (FLOAT, [])}
    path = save(tmp_path / "audio.onnx", nodes, inputs, ["y"])
    assert import_onnx(path).batch_axes == {"audio": None, "gain": None}


@pytest.mark.parametrize("size", [-1, 0])
def test_a_size_below_one_is_an_open_one(size: int, tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"], "/Relu")]
    path = save(tmp_path / "open.onnx", nodes, {"x": (FLOAT, [1, 3, "height", "width"])}, ["y"])
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size
    onnx.save(model, str(path))
    assert import_onnx(path).batch_axes == {"x": 0}
    (one,) = file_inputs(path, read(path), ())
    assert (one.shape, one.axis) == ((None, 3, None, None), 0)
    assert one.names[2:] == ("height", "width") and one.below is None


@pytest.mark.parametrize("shape", [[-1], [-1, 1]])
def test_places_of_the_images_follow_the_batch(shape: list[int], tmp_path: Path) -> None:
    """A Range over the batch size gives the indices of a Gather and an operand of an Add."""
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], start=0, end=1),
        helper.make_node("Squeeze", ["size"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["range"]),
        helper.make_node("Reshape", ["range", "shape"], ["places"]),
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("Flatten", ["a"], ["f"]),
        helper.make_node("Gather", ["f", "places"], ["rows"]),
        helper.make_node("Flatten", ["rows"], ["y"]),
        helper.make_node("ReduceSum", ["f", "axis"], ["sum"], keepdims=len(shape) - 1),
        helper.make_node("Cast", ["sum"], ["whole"], to=INT64),
        helper.make_node("Add", ["whole", "places"], ["z"]),
    ]
    constants = {"zero": np.array(0), "one": np.array(1), "axis": np.array([1]), "shape": np.array(shape)}
    constants["w"] = floats(4, 3, 3, 3)
    path = save(tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 3, 4, 4])}, ["y", "z"], constants)
    graph = trace(import_onnx(path), torch.from_numpy(floats(2, 3, 4, 4)))
    for count in (1, 5):
        x = floats(count, 3, 4, 4)
        wanted = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
        found = graph(torch.from_numpy(x))
        np.testing.assert_allclose(found[0].detach(), wanted[0], atol=1e-4)
        assert np.array_equal(found[1], wanted[1])
