"""Tests of sessions: a file that cannot be loaded gives a one-line error, and any batch size works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from qdq_graphs import classifier

from qatkit.verify.divergence import optimizer_divergence
from qatkit.verify.emulation import Emulation
from qatkit.verify.profile import run_optimized
from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array
from qatkit_verify.int8_operators import int8_operators
from qatkit_verify.kernels import executed
from qatkit_verify.session import in_full_batches, in_its_batches, open_session, run_images


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the file does not exist"):
        open_session(tmp_path / "absent.onnx", threads=1)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"broken\.onnx: ONNX Runtime .* can't load the file") as error:
        open_session(broken, threads=1)
    assert "\n" not in str(error.value) and str(error.value).count(str(broken)) == 1
    classifier(tmp_path / "good.onnx")
    with pytest.raises(ConfigError, match=r"verify\.threads=0"):
        open_session(tmp_path / "good.onnx", threads=0)


def test_optimization_level_decides_the_graph(tmp_path: Path) -> None:
    classifier(tmp_path / "m.onnx")
    kinds = {}
    for name, optimize in (("off", False), ("all", True)):
        open_session(tmp_path / "m.onnx", threads=1, optimize=optimize, optimized_path=tmp_path / name)
        kinds[name] = {node.op_type for node in onnx.load(str(tmp_path / name)).graph.node}
    assert "Conv" in kinds["off"]
    assert "QLinearConv" in kinds["all"]


def test_weights_beside_the_file_are_found_by_every_optimizer(tmp_path: Path) -> None:
    """The optimized graph that ONNX Runtime saves would refer to a folder without these weights."""
    images = np.random.default_rng(0).standard_normal((2, 16, 8, 8), dtype=np.float32)
    found = []
    for name in ("inside", "beside"):
        path = tmp_path / name / "m.onnx"
        path.parent.mkdir()
        classifier(path, batch=2)
        model = onnx.load(str(path))
        path.unlink()
        beside = name == "beside"
        onnx.save(model, str(path), save_as_external_data=beside, location="m.data", size_threshold=0)
        emulation = Emulation(path, options={}, threads=1)
        found.append(
            (
                [(one.name, one.precision, one.macs) for one in executed(path)],
                int8_operators(path),
                emulation.outputs(images)[0].tolist(),
                [node.op_type for node in run_optimized(path).graph],
                optimizer_divergence(path, images, threads=1).first,
            )
        )
    assert (tmp_path / "beside" / "m.data").is_file()
    assert found[0] == found[1] and len(found[0][1]) == 2


@pytest.mark.parametrize("images", [1, 4, 7])
def test_a_fixed_batch_file_takes_any_number_of_images(images: int, tmp_path: Path) -> None:
    classifier(tmp_path / "fixed.onnx", batch=4)
    classifier(tmp_path / "dynamic.onnx")
    pixels = np.random.default_rng(0).standard_normal((images, 16, 8, 8), dtype=np.float32)
    logits = run_images(open_session(tmp_path / "fixed.onnx", threads=1), pixels)
    reference = ort.InferenceSession(tmp_path / "dynamic.onnx").run(None, {"input": pixels})[0]
    np.testing.assert_array_equal(logits, reference)


def test_inputs_of_equal_rows_are_run_in_full_batches() -> None:
    def run(given: Mapping[str, Any]) -> list[Any]:
        assert len(given["x"]) == len(given["state"]) == 2
        return [given["x"] + given["state"]]

    x, state = np.arange(5.0)[:, None], np.ones((5, 1))
    (found,) = in_its_batches(run, {"x": x, "state": state}, 2)
    np.testing.assert_array_equal(found, x + 1)


def test_inputs_of_other_lengths_are_one_batch() -> None:
    def run(given: Mapping[str, Any]) -> list[Any]:
        assert given["x"].shape == (1, 4) and given["state"].shape == (2, 1, 3)
        return [given["x"] + 1]

    (found,) = in_its_batches(run, {"x": np.zeros((1, 4)), "state": np.zeros((2, 1, 3))}, 1)
    assert found.tolist() == [[1, 1, 1, 1]]


def test_outputs_that_are_not_per_image_are_kept_whole() -> None:
    def run(given: Mapping[str, Array]) -> list[Array]:
        x = given["x"]  # outputs: one row per image, three boxes per image, one number
        return [x * 2, np.repeat(x, 3, axis=0), np.asarray(x.sum())]

    x = np.arange(4.0).reshape(4, 1)
    doubled, boxes, total = in_full_batches(run, {"x": x}, 2)
    np.testing.assert_array_equal(doubled, x * 2)
    np.testing.assert_array_equal(boxes, np.repeat(x, 3, axis=0))
    np.testing.assert_array_equal(total, [1.0, 5.0])
    assert in_full_batches(run, {"x": x[:3]}, 2)[0].tolist() == [[0], [2], [4]]
