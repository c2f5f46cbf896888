"""Small ONNX files written as text, cleaned, and run by ONNX's reference evaluator and by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from qatkit.export.clean.run import Asked, Cleaned, clean
from qatkit.importing.read import read

Arrays = dict[str, NDArray[Any]]
NOTHING = Asked({}, "none", False, {}, None, False, "keep", None)


def drawn(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Returns standard normal values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def save(path: Path, text: str, weights: Arrays | None = None) -> Path:
    """Writes a model given in ONNX's text syntax, with `weights` as additional initializers."""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in (weights or {}).items()
    )
    onnx.save(model, path)
    return path


def cleaned(source: Path, **asked: Any) -> tuple[Cleaned, onnx.ModelProto]:
    """Cleans a file into the folder `cleaned` next to it; returns the record and the cleaned model."""
    folder = source.parent / "cleaned"
    folder.mkdir(exist_ok=True)
    found = clean(source, read(source, as_is=True), NOTHING._replace(**asked), folder / "model.clean.onnx", 1)
    return found, onnx.load(folder / "model.clean.onnx")


def reference(source: Path, feeds: Arrays) -> list[NDArray[Any]]:
    """Returns the outputs of ONNX's reference evaluator, which is written in NumPy."""
    return [np.asarray(one) for one in ReferenceEvaluator(str(source)).run(None, feeds)]


def run(path: Path, feeds: Arrays) -> list[NDArray[Any]]:
    """Returns the outputs of ONNX Runtime with its default optimizations."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [np.asarray(one) for one in session.run(None, feeds)]


def kinds(model: onnx.ModelProto) -> list[str]:
    """Returns the operator types of the main graph's nodes, in order."""
    return [node.op_type for node in model.graph.node]


def sizes(value: onnx.ValueInfoProto) -> list[int | str]:
    """Returns the dimensions of a tensor."""
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
