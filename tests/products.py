"""Bundles of y = x · W: int4 weights with float activations, or int8 weights with uint8 or uint16 activations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from qatkit_verify.bundle.golden import Golden, tolerances, write_golden
from qatkit_verify.bundle.manifest import GOLDEN_FILE, INT8_FILE, REPORT_FILE, Manifest, entry, write_manifest

EXACT = {"session.qdq_matmulnbits_accuracy_level": "0"}
LEVEL_4 = {"session.qdq_matmulnbits_accuracy_level": "4"}  # the default of ONNX Runtime
_ROWS, _COLUMNS, _BLOCK = 256, 64, 32


def int4_in_blocks(path: Path) -> Path:
    """Writes a MatMul with float activations and one scale per 32 int4 weights; ONNX Runtime runs MatMulNBits."""
    draw = np.random.default_rng(0)
    scales = draw.uniform(0.005, 0.02, (_ROWS // _BLOCK, _COLUMNS)).astype(np.float32)
    weights = draw.integers(-7, 8, (_ROWS, _COLUMNS))
    stored = [
        helper.make_tensor("w", TensorProto.INT4, weights.shape, weights.ravel().tolist()),
        numpy_helper.from_array(scales, "ws"),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"], axis=0, block_size=_BLOCK),
        helper.make_node("MatMul", ["x", "wd"], ["y"], "product"),
    ]
    return _saved(path, nodes, stored)


def int8_by(activation: str, path: Path) -> Path:
    """Writes a file with int8 weights, one scale per column, and "uint8" or "uint16" activations.

    The weights are within ±64, so that no CPU saturates.
    """
    draw = np.random.default_rng(0)
    kind = np.dtype(activation)
    most = np.iinfo(kind).max
    stored = {
        "w": draw.integers(-64, 65, (_ROWS, _COLUMNS)).astype(np.int8),
        "ws": draw.uniform(0.0004, 0.002, _COLUMNS).astype(np.float32), "wz": np.zeros(_COLUMNS, np.int8),
        "xs": np.float32(10 / most), "xz": np.asarray(most // 2 + 1, kind),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=1),
        helper.make_node("MatMul", ["xd", "wd"], ["y"], "product"),
    ]
    return _saved(
        path, nodes, [numpy_helper.from_array(np.asarray(one), name) for name, one in stored.items()]
    )


def _saved(path: Path, nodes: list[onnx.NodeProto], stored: list[onnx.TensorProto]) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", _ROWS])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", _COLUMNS])
    graph = helper.make_graph(nodes, "product", [x], [y], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), str(path))
    return path


def inputs() -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal((8, _ROWS)).astype(np.float32)


def answers(path: Path, options: Mapping[str, str], level: str = "ORT_ENABLE_ALL") -> Any:
    """Returns ONNX Runtime's outputs for each row of `inputs`, with `options` as the only config entries."""
    settings = ort.SessionOptions()
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    for key, value in options.items():
        settings.add_session_config_entry(key, value)
    session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {"x": row[None]})[0] for row in inputs()])


def bundle_of(folder: Path, *, golden: Any, told: Mapping[str, str] | None) -> Path:
    """Completes the bundle in `folder` and returns the folder.

    Args:
        folder: folder with model.onnx.
        golden: outputs, with optimizations, of the runtime that verified the file.
        told: session options in the manifest; None for a manifest of an older qatkit, which has none.
    """
    off = {"y": answers(folder / INT8_FILE, {}, "ORT_DISABLE_ALL")}
    steps = {"y": float(np.ptp(golden)) / 255}  # the step of a float output
    own, other = tolerances(off, {"y": golden}, steps)
    write_golden(folder / GOLDEN_FILE, Golden((), {"x": inputs()}, off, {"y": golden}, steps, own, other))
    (folder / REPORT_FILE).write_text('{"versions": {}}')
    files = tuple(entry(folder, name) for name in (INT8_FILE, GOLDEN_FILE, REPORT_FILE))
    made_by, requires = (
        {"onnxruntime": ort.__version__},
        {"onnxruntime": "1.23", "opset": 21, "ir_version": 10},
    )
    version = None if told is None else ort.__version__
    write_manifest(
        folder, Manifest("product", made_by, requires, files, onnxruntime=version, session_options=told)
    )
    return folder
