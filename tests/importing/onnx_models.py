"""Helpers that write ONNX files for tests of the importer and compare its modules with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from qatkit.importing import import_onnx

Array = np.ndarray[Any, Any]


def onnx_type(array: Array) -> int:
    """Returns ONNX's type number for an array."""
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Array | tuple[int, Sequence[Any]]],
    outputs: Sequence[str],
    constants: Mapping[str, Array] | None = None,
    *,
    opset: int = 17,
    **more: Any,
) -> Path:
    """Writes a model; each input is an example array or a type and a shape, whose sizes may be names."""
    given = []
    for name, one in inputs.items():
        kind, shape = (onnx_type(one), one.shape) if isinstance(one, np.ndarray) else one
        given.append(helper.make_tensor_value_info(name, kind, shape))
    initializers = [
        numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()
    ]
    graph = helper.make_graph(
        list(nodes),
        "graph",
        given,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        initializers,
    )
    imports = [helper.make_opsetid("", opset), *more.pop("imports", ())]
    model = helper.make_model(graph, opset_imports=imports, ir_version=more.pop("ir_version", 8), **more)
    onnx.save(model, str(path))
    return path


def sqnr(wanted: Array, found: Array) -> float:
    """Returns the SQNR in dB (infinite if equal), without values that are the same infinity in both."""
    assert wanted.shape == found.shape
    finite = ~((wanted == found) & np.isinf(wanted))
    a, b = wanted[finite].astype(np.float64), found[finite].astype(np.float64)
    noise = np.square(a - b).sum()
    return float("inf") if noise == 0 else float(10 * np.log10(np.square(a).sum() / noise))


def in_onnxruntime(
    path: Path, feeds: Mapping[str, Array], fixed: Mapping[str, Any] | None = None
) -> list[Array]:
    """Returns a file's outputs in ONNX Runtime without graph optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, {**feeds, **(fixed or {})})
    return found


def imported(path: Path, feeds: Mapping[str, Array], fixed: Mapping[str, Any] | None = None) -> list[Array]:
    """Returns the outputs of the imported module."""
    model = import_onnx(path, fixed=fixed)
    with torch.no_grad():
        made = model(**{name: torch.from_numpy(np.asarray(value)) for name, value in feeds.items()})
    return [one.numpy() for one in ([made] if isinstance(made, torch.Tensor) else made.values())]


def check(
    path: Path, feeds: Mapping[str, Array], *, least: float = 110.0, fixed: Mapping[str, Any] | None = None
) -> None:
    """Checks the imported module against ONNX Runtime: floats by an SQNR of `least` dB, all else exactly.

    Args:
        path: the file.
        feeds: values by input name.
        least: the smallest SQNR allowed.
        fixed: values of inputs that become constants, by name.
    """
    wanted, found = in_onnxruntime(path, feeds, fixed), imported(path, feeds, fixed)
    assert len(wanted) == len(found)
    for a, b in zip(wanted, found, strict=True):
        assert a.shape == b.shape
        if a.dtype.kind == "f":
            assert sqnr(a, b) >= least
        else:
            assert np.array_equal(a, b)


FLOAT, INT64, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
FLOAT16 = TensorProto.FLOAT16
