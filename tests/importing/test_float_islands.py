"""Tests of islands, the parts of an ONNX file that PyTorch cannot compute.

The imported module runs them in ONNX Runtime, and the quantized file keeps their nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import island_nets
import numpy as np
import onnx
import pytest
import torch
from island_nets import IMAGE, floats
from onnx import TensorProto, helper
from onnx_models import FLOAT, Array, check, in_onnxruntime, save
from written import difference, same, write

from qatkit import QATModule, export_onnx
from qatkit.config.schema import ScheduleConfig
from qatkit.graph.gradients import stopped
from qatkit.graph.trace import trace
from qatkit.importing import import_onnx, prove_import
from qatkit.importing.island import Island
from qatkit.verify.audit import audit
from qatkit_verify.errors import ConfigError

_X = {"x": IMAGE}
CASES: dict[str, tuple[Callable[[Path], Path], dict[str, Array], set[str]]] = {
    "a Loop with captured weights": (island_nets.loop, _X, {"Loop"}),
    "a Scan": (island_nets.scan, _X, {"Scan"}),
    "an If that values decide": (island_nets.condition, _X, {"If"}),
    "an operator of com.microsoft": (island_nets.contrib, _X, {"com.microsoft.Inverse"}),
    "images that values choose": (island_nets.values_of_some_images, _X, {"Compress"}),
    "a computed count": (island_nets.largest, _X, {"TopK"}),
    "sequences": (
        island_nets.sequences,
        _X,
        {"SplitToSequence", "SequenceAt", "SequenceErase", "SequenceInsert", "ConcatFromSequence"},
    ),
    "boxes": (island_nets.boxes, _X, {"NonMaxSuppression", "Gather", "Squeeze"}),
    "strings": (
        island_nets.words,
        {"ids": np.array([0, 2, 1, 1, 0])},
        {"Gather", "StringNormalizer", "ai.onnx.ml.LabelEncoder"},
    ),
    "hashes": (
        island_nets.hashes,
        {"ids": np.arange(12, dtype=np.int32).reshape(2, 6)},
        {"com.microsoft.MurmurHash3"},
    ),
    "a sequence behind its length": (
        island_nets.turned_back,
        _X,
        {"SplitToSequence", "SequenceLength", "Sub", "SequenceAt"},
    ),
    "sizes that values decide": (island_nets.sizes_of_some_images, _X, {"Compress", "Shape", "Reshape"}),
    "a branch": (island_nets.in_a_branch, _X, {"NonZero"}),
    "a constant string": (island_nets.a_number_in_words, _X, {"Constant", "Cast"}),
    "an old opset": (island_nets.old, _X, {"NonZero"}),
    "sequences of different lengths": (
        island_nets.lengths,
        {"x": floats(7, 2, 5), "lengths": np.array([7, 4], np.int32)},
        {"GRU"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_file_keeps_what_pytorch_lacks(case: str, tmp_path: Path) -> None:
    make, feeds, operators = CASES[case]
    source = make(tmp_path / "m.onnx")
    check(source, feeds)
    model = import_onnx(source)
    assert {one for island in model.islands.values() for one in island.region.operators} == operators
    prove_import(model, feeds)
    tensors = {name: torch.from_numpy(value) for name, value in feeds.items()}
    written = write(source, tensors)
    same(written, tensors, steps=1.0)
    found = difference(source, written.path)
    assert not found.gone
    assert found.pairs > 0
    assert not found.changed - {"/m/Loop", "/m/If"}  # their bodies read dequantized values
    before, after = (
        {name: value for name, value in _operators(path).items() if name in operators}
        for path in (source, written.path)
    )
    assert all(after[name] >= count for name, count in before.items())  # an int8 table adds a Gather


def _operators(path: Path) -> dict[str, int]:
    names = [
        f"{one.domain}.{one.op_type}" if one.domain else one.op_type for one in onnx.load(path).graph.node
    ]
    return {name: names.count(name) for name in names}


def test_convolutions_around_an_island_run_in_int8(tmp_path: Path) -> None:
    written = write(island_nets.boxes(tmp_path / "m.onnx"), {"x": torch.from_numpy(IMAGE)})
    assert written.optimized()["QLinearConv"] == 3
    found = {one.op: one for one in audit(written.path).nodes}
    assert found["NonMaxSuppression"].precision == "float"
    assert found["NonMaxSuppression"].reason == "ONNX Runtime has no 8-bit NonMaxSuppression on the CPU"


def test_another_count_of_values_in_each_run(tmp_path: Path) -> None:
    source = island_nets.values_of_some_images(tmp_path / "m.onnx")
    model = import_onnx(source)
    module = QATModule(model, {"x": torch.from_numpy(IMAGE)})
    module.calibrate([{"x": torch.randn(4, 3, 8, 8)}, {"x": torch.full((3, 3, 8, 8), -90.0)}])
    graph = module.convert().graph
    for count, scale in ((5, 1.0), (3, 0.0), (1, 3.0)):
        x = torch.from_numpy(floats(count, 3, 8, 8)) * scale
        wanted = in_onnxruntime(source, {"x": x.numpy()})[0]
        assert graph(x).shape == wanted.shape


def test_an_island_image_by_image(tmp_path: Path) -> None:
    """With a fixed batch size of 1, an island runs once per image, so each image keeps its own boxes."""
    source = island_nets.boxes(tmp_path / "m.onnx")
    model = onnx.load(source)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, source)
    found = import_onnx(source)
    assert found.any_batch
    with torch.no_grad():
        both = found(torch.from_numpy(IMAGE))
    alone = [in_onnxruntime(source, {"x": IMAGE[i : i + 1]}) for i in range(2)]
    assert np.array_equal(both["kept"].numpy(), np.concatenate([one[1] for one in alone]))
    np.testing.assert_allclose(both["scores"], np.concatenate([one[2] for one in alone]), atol=1e-5)


def test_types_that_the_module_does_not_have(tmp_path: Path) -> None:
    """Values that are float16 or uint64 in the file have these types inside an island."""
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], "half", to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["x"], ["u"], "whole", to=TensorProto.UINT64),
        helper.make_node("NonZero", ["h"], ["places"], "places"),
        helper.make_node("Compress", ["u", "chosen"], ["some"], "some", axis=0),
        helper.make_node("Cast", ["some"], ["y"], "back", to=TensorProto.FLOAT),
        helper.make_node("Cast", ["x"], ["chosen_"], "b", to=TensorProto.BOOL),
        helper.make_node("Reshape", ["chosen_", "flat"], ["chosen"], "flat"),
    ]
    nodes = [*nodes[:3], *nodes[5:], *nodes[3:5]]
    x = np.array([[3.0], [0.0], [7.0]], np.float32)
    path = save(tmp_path / "m.onnx", nodes, {"x": x}, ["y", "places"], {"flat": np.array([-1])})
    check(path, {"x": x})


def test_a_copy_of_an_island_computes_the_same(tmp_path: Path) -> None:
    model = import_onnx(island_nets.loop(tmp_path / "m.onnx"))
    x = torch.from_numpy(IMAGE)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert all(isinstance(module, Island) for module in model.islands.values())


def test_gradients_stop_at_an_island(tmp_path: Path) -> None:
    x = torch.from_numpy(IMAGE)
    module = QATModule(import_onnx(island_nets.scan(tmp_path / "m.onnx")), {"x": x}, ScheduleConfig(epochs=2))
    module.calibrate([{"x": x}])
    found = stopped(module.graph.graph)
    assert found is not None
    assert (found.weights, found.by) == ("/a/Conv", "/last/Scan")
    with pytest.raises(
        ConfigError, match=r"schedule\.epochs=2: expected 0 .*'/a/Conv'.*only through '/last/Scan'"
    ):
        module.setup("fit")
    module.graph(x).square().mean().backward()
    trained = {name for name, one in module.graph.named_parameters() if one.grad is not None}
    assert any("/y/Conv" in name for name in trained) and not any("/a/Conv" in name for name in trained)


def test_gradients_go_around_an_island(tmp_path: Path) -> None:
    x = torch.from_numpy(IMAGE)
    module = QATModule(import_onnx(_beside(tmp_path / "m.onnx")), {"x": x})
    module.calibrate([{"x": x}])
    assert stopped(module.graph.graph) is None
    module.setup("fit")


def _beside(path: Path) -> Path:
    """Writes a file with two outputs: the result of a convolution and the indices of its positive values."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], "conv"),
        helper.make_node("Relu", ["y"], ["r"], "relu"),
        helper.make_node("NonZero", ["r"], ["places"], "places"),
    ]
    return save(path, nodes, {"x": (FLOAT, ["N", 3, 8, 8])}, ["y", "places"], {"w": floats(4, 3, 3, 3)})


def test_a_new_file_has_no_form_for_an_island(tmp_path: Path) -> None:
    x = torch.from_numpy(IMAGE)
    module = QATModule(import_onnx(island_nets.scan(tmp_path / "m.onnx")), {"x": x})
    module.calibrate([{"x": x}])
    with pytest.raises(
        ConfigError,
        match=r"onnx=.*/last/Scan: this part of the file runs in ONNX Runtime.*edit the given file",
    ):
        export_onnx(module.convert().graph, {"x": x}, tmp_path / "new.onnx")


def test_a_random_number_in_a_body_is_refused(tmp_path: Path) -> None:
    source = island_nets.loop(tmp_path / "m.onnx")
    model = onnx.load(source)
    body = next(one for one in model.graph.node if one.op_type == "Loop").attribute[0].g
    body.node[0].CopyFrom(helper.make_node("RandomNormalLike", ["state"], ["scaled"], "noise"))
    onnx.save(model, source)
    with pytest.raises(ConfigError, match="node 'noise': RandomNormalLike draws random numbers"):
        import_onnx(source)


def test_an_input_of_strings_is_refused(tmp_path: Path) -> None:
    made = helper.make_node("StringNormalizer", ["s"], ["y"], "lower", locale="C")
    path = save(tmp_path / "m.onnx", [made], {"s": (TensorProto.STRING, ["N"])}, ["y"])
    with pytest.raises(ConfigError, match="input 's' is not a tensor of numbers"):
        import_onnx(path)


def test_a_library_of_operators(tmp_path: Path) -> None:
    made = helper.make_node("Magic", ["x"], ["y"], "magic", domain="acme")
    path = save(tmp_path / "m.onnx", [made], _X, ["y"], imports=[helper.make_opsetid("acme", 1)])
    with pytest.raises(
        ConfigError, match=r"library that implements acme\.Magic: import_onnx\(\.\.\., custom_ops="
    ):
        import_onnx(path)
    with pytest.raises(ConfigError, match=r"custom_ops=.*: expected an existing library of custom operators"):
        import_onnx(path, custom_ops=tmp_path / "none.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(ConfigError, match=r"custom_ops=.*: ONNX Runtime .* can't load the library"):
        import_onnx(path, custom_ops=tmp_path / "text.so")


def test_computed_bounds_of_a_clip(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["low"], "mean", keepdims=0),
        helper.make_node("Clip", ["x", "low", "high"], ["y"], "clip"),
    ]
    path = save(tmp_path / "m.onnx", nodes, _X, ["y"], {"high": np.array(0.5, np.float32)})
    check(path, _X)
    assert not import_onnx(path).islands
    x = torch.from_numpy(IMAGE)
    assert torch.equal(
        trace(import_onnx(path), {"x": x})(x), torch.minimum(torch.maximum(x, x.mean()), torch.tensor(0.5))
    )
