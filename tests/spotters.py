"""The files of a small bundle with a streaming model: a GRU written node by node without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from qatkit_verify.bundle.golden import Golden, write_golden
from qatkit_verify.bundle.manifest import FLOAT_FILE, GOLDEN_FILE, INT8_FILE

BANDS, SIZE, CLASSES, STREAM = 4, 5, 3, "model.stream.onnx"
HOW = json.dumps({"axis": 1, "states": {"state_0": "state_0_next"}})


def spotter(path: Path, *, stream: bool = False, told: str | None = HOW, gain: float = 1.0) -> None:
    """Writes a GRU with x [N, T, bands] and y [N, classes]; `gain` scales the weights after it.

    With `stream`, the file also has a state as input and output, and the metadata `told` (None: none).
    """
    draw = np.random.default_rng(0)
    shapes = {"w": (1, 3 * SIZE, BANDS), "r": (1, 3 * SIZE, SIZE), "b": (1, 6 * SIZE), "c": (SIZE, CLASSES)}
    stored = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    stored["c"] *= np.float32(gain)
    weights = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    weights.append(numpy_helper.from_array(np.array([0]), "axis"))
    given = ["x_t", "w", "r", "b", *(["", "raised"] if stream else [])]
    nodes = [
        helper.make_node("Transpose", ["x"], ["x_t"], perm=[1, 0, 2]),
        *([helper.make_node("Unsqueeze", ["state_0", "axis"], ["raised"])] if stream else []),
        helper.make_node("GRU", given, ["", "last"], hidden_size=SIZE),
        helper.make_node("Squeeze", ["last", "axis"], ["state_0_next"]),
        helper.make_node("MatMul", ["state_0_next", "c"], ["y"]),
    ]
    ends: dict[str, tuple[Any, ...]] = {"x": ("N", "T", BANDS), "y": ("N", CLASSES)}
    ends |= dict.fromkeys(("state_0", "state_0_next") if stream else (), ("N", SIZE))
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in ends.items()
    }
    names = (("x", "state_0"), ("y", "state_0_next")) if stream else (("x",), ("y",))
    inputs, outputs = ([values[name] for name in side] for side in names)
    graph = helper.make_graph(nodes, "spotter", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    if stream and told is not None:
        helper.set_model_props(model, {"qatkit.stream": told})
    onnx.save(model, str(path))


def make(folder: Path) -> Path:
    """Writes all files of a bundle except its manifest, and returns its folder."""
    folder.mkdir()
    spotter(folder / INT8_FILE)
    spotter(folder / STREAM, stream=True)
    shutil.copy(folder / INT8_FILE, folder / FLOAT_FILE)
    sounds = np.random.default_rng(1).standard_normal((3, 23, BANDS)).astype(np.float32)
    golden = {"y": ort.InferenceSession(folder / INT8_FILE).run(["y"], {"x": sounds})[0]}
    write_golden(folder / GOLDEN_FILE, Golden((), {"x": sounds}, golden, golden, {"y": 0.01}, 1.0, 8.0))
    (folder / "report.json").write_text(json.dumps({"label": "float", "versions": {}}))
    return folder
