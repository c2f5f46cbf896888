"""Tests of the Python program of a report, run on a picture, against the preprocessing that it implements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from qatkit.data import Preprocessing
from qatkit.report.run_code import Loading, programs
from qatkit_verify.preprocess import Preprocess

CASES: dict[str, dict[str, Any]] = {
    "crop": {},
    "oblong crop": {"image_size": (20, 33), "resize": (24, 36)},
    "high crop": {"image_size": (33, 20), "resize": (40, 20)},
    "resize": {"image_size": (20, 33), "fit": "resize"},
    "letterbox": {"image_size": (20, 33), "fit": "letterbox"},
    "letterbox at the top left": {
        "image_size": (33, 20),
        "fit": "letterbox",
        "align": "top_left",
        "pad_value": 0.0,
    },
    "bgr": {"order": "bgr", "mean": (0.4, 0.5, 0.6)},
    "channels last": {"layout": "nhwc", "image_size": (20, 33), "fit": "resize"},
    "0..255": {"pixels": "0..255", "mean": (104.0, 117.0, 123.0), "std": (58.0, 57.0, 57.5)},
    "nearest": {"interpolation": "nearest", "image_size": (20, 33), "fit": "resize"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [(50, 70), (70, 50), (9, 12)])
def test_the_program_prepares_as_it_is_told(
    case: str, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: dict[str, Any] = {"image_size": 24, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    settings = usual | CASES[case]
    settings.setdefault("resize", settings["image_size"])
    prepare = Preprocessing(**settings)
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    monkeypatch.chdir(tmp_path)
    Image.fromarray(pixels).save("image.png")
    nodes = [helper.make_node("Flatten", ["x"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "flat",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *prepare.shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), "flat.onnx"
    )

    code = programs(Loading("flat.onnx", prepare.as_dict(), labels=None))["Python"]
    seen: dict[str, Any] = {}
    exec(code.replace("image.jpg", "image.png"), seen)

    told = prepare.as_dict() | {"crop": "none", "input": {"dtype": "float32"}}
    expected = Preprocess.from_dict(told)(pixels)
    assert seen["batch"].shape == expected.shape
    level = (1 if prepare.pixels == "0..255" else 1 / 255) / min(prepare.std)
    assert np.abs(seen["batch"] - expected).max() <= 1.01 * level
