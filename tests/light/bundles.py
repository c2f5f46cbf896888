"""A small bundle, made without torch: a quantized MatMul with its golden vectors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from qatkit_verify.bundle.golden import Golden, tolerances, write_golden
from qatkit_verify.bundle.manifest import GOLDEN_FILE, INT8_FILE, Manifest, entry, write_manifest

SCALE = 0.02


def make(folder: Path, *, signer: str | None = None, batch: int | str = "N") -> Path:
    """Writes a bundle with three labels and a report, and returns its folder.

    Args:
        folder: the folder to make.
        signer: the public key that the manifest names.
        batch: the batch size of the file, or "N" for a dynamic one.
    """
    folder.mkdir()
    _onnx(folder / INT8_FILE, batch)
    shutil.copy(folder / INT8_FILE, folder / "float.onnx")
    inputs = {"x": np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)}
    rows = 4 if batch == "N" else int(batch)
    chunks = np.resize(inputs["x"], (max(1, 4 // rows), rows, 8))
    outputs = {}
    for name, level in (("off", "ORT_DISABLE_ALL"), ("on", "ORT_ENABLE_ALL")):
        settings = ort.SessionOptions()
        settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        session = ort.InferenceSession(str(folder / INT8_FILE), settings, providers=["CPUExecutionProvider"])
        outputs[name] = {"y": np.concatenate([session.run(None, {"x": one})[0] for one in chunks])[:4]}
    steps = {"y": SCALE}
    own, other = tolerances(outputs["off"], outputs["on"], steps)
    write_golden(folder / GOLDEN_FILE, Golden((), inputs, outputs["off"], outputs["on"], steps, own, other))
    (folder / "labels.txt").write_text("cat\ndog\nfox\n")
    (folder / "report.json").write_text(json.dumps({"audit": {"int8_share": 1.0}, "versions": {}}))
    seal(folder, signer)
    return folder


def seal(folder: Path, signer: str | None = None, name: str = "small") -> None:
    """Writes the manifest of the folder's current files."""
    there = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("manifest.")]
    files = tuple(entry(folder, path.relative_to(folder).as_posix()) for path in there)
    requires = {"onnxruntime": "1.23", "opset": 13, "ir_version": 8}
    write_manifest(folder, Manifest(name, {"qatkit": "0"}, requires, files, signer))


def _onnx(path: Path, batch: int | str) -> None:
    draw = np.random.default_rng(0)
    stored = {
        "xs": np.float32(0.03), "xz": np.uint8(128), "w": draw.integers(-127, 128, (8, 3)).astype(np.int8),
        "ws": np.float32(0.01), "wz": np.int8(0), "ys": np.float32(SCALE), "yz": np.uint8(120),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["p"], "product"),
        helper.make_node("QuantizeLinear", ["p", "ys", "yz"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "ys", "yz"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
