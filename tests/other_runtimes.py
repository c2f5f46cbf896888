"""Fake runtimes on ONNX's reference evaluator, which is slow but written independently of ONNX Runtime."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from qatkit_verify.runtimes.base import Execute, Runtime

SPOILED = "conv2.weight"  # the sign of its first filter is flipped
DELAY = 0.02  # additional seconds for a quantized file


def _open(path: Path, threads: int) -> Execute:
    return _evaluator(onnx.load(str(path)))


def _evaluator(model: onnx.ModelProto) -> Execute:
    from onnx.reference import (
        ReferenceEvaluator,  # slow to import, and not needed by a process that fails
    )

    session = ReferenceEvaluator(model)

    def execute(given: Mapping[str, Any]) -> list[Any]:
        return list(session.run(None, dict(given)))

    return execute


def _open_spoiled(path: Path, threads: int) -> Execute:
    model = onnx.load(str(path))
    for tensor in model.graph.initializer:
        if tensor.name.startswith(SPOILED) and tensor.data_type == onnx.TensorProto.INT8 and tensor.dims:
            values = numpy_helper.to_array(tensor).copy()
            values[0] = -values[0]
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return _evaluator(model)


def _open_slow(path: Path, threads: int) -> Execute:
    """Opens a runtime that returns zeros, and takes `DELAY` longer for a quantized file."""
    model = onnx.load(str(path))
    print("noise on standard output is no answer")
    delay = DELAY if any(node.op_type == "QuantizeLinear" for node in model.graph.node) else 0.0

    def execute(given: Mapping[str, Any]) -> list[Any]:
        time.sleep(0.005 + delay)
        return [np.zeros((len(next(iter(given.values()))), 10), np.float32)]

    return execute


def _open_not(path: Path, threads: int) -> Execute:
    raise RuntimeError("no kernel\nfor this")


def _absent() -> Mapping[str, str]:
    raise ModuleNotFoundError("No module named 'tvm'")


REFERENCE = Runtime("reference", _open, lambda: {"onnx": onnx.__version__})
WRONG = Runtime("wrong", _open_spoiled, lambda: {"onnx": onnx.__version__})
SLOW = Runtime("slow", _open_slow, dict)
BROKEN = Runtime("broken", _open_not, dict)
ABSENT = Runtime("tvm", _open, _absent, extra="tvm")


def _open_dying(path: Path, threads: int) -> Execute:
    os._exit(3)


def _open_fusing(path: Path, threads: int) -> Execute:
    """Opens a runtime that adds a Conv's output unquantized, unless the quantized one is a graph output."""
    model = onnx.load(str(path))
    outputs = {one.name for one in model.graph.output}
    made = {name: node for node in model.graph.node for name in node.output}
    (at,) = [i for i, node in enumerate(model.graph.node) if node.name == "add/Add"]
    quantize = made.get(made[model.graph.node[at].input[0]].input[0])
    if quantize is not None and quantize.output[0] not in outputs:
        assert made[quantize.input[0]].op_type == "Conv"
        cast = onnx.helper.make_node("Cast", [quantize.input[0]], ["unquantized"], to=onnx.TensorProto.FLOAT)
        model.graph.node[at].input[0] = "unquantized"  # the evaluator's Conv returns doubles
        model.graph.node.insert(at, cast)
    return _evaluator(model)


DYING = Runtime("dying", _open_dying, dict)
FUSING = Runtime("fusing", _open_fusing, lambda: {"onnx": onnx.__version__})
