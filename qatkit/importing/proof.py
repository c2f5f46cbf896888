"""Proof of an import: the module gives what the file gives in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from qatkit.export.quiet import quiet
from qatkit.importing.program import ImportedModel
from qatkit.importing.read import read
from qatkit_verify.errors import ConfigError

Feeds = Mapping[str, "np.ndarray[Any, Any]"]
ENOUGH = 100.0  # dB: float32 rounding of a deep network stays above it


def session(
    path: Path, model: ir.Model | None = None, folder: Path | None = None
) -> onnxruntime.InferenceSession:
    """Returns a session without optimizations, of one thread."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def sqnr(wanted: Any, got: Any) -> float:
    """Returns the signal-to-noise ratio in dB; infinite where both are equal, -infinity where shapes differ."""
    a, b = np.asarray(wanted, np.float64), np.asarray(got, np.float64)
    if a.shape != b.shape:
        return float("-inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return float("inf")
    a, b = np.where(same, np.nan_to_num(a), a), np.where(same, np.nan_to_num(a), b)
    noise, signal = np.sum((a - b) ** 2), np.sum(a**2)
    return float(10 * np.log10(max(signal, 1e-300) / noise)) if np.isfinite(noise) else float("-inf")


def prove_import(model: ImportedModel, feeds: Feeds) -> dict[str, float]:
    """Compares the module with its file on one set of inputs.

    Args:
        feeds: arrays by the names of the module's inputs.

    Returns:
        The signal-to-noise ratio of each output, in dB.

    Raises:
        ConfigError: an output differs by more than rounding.
    """
    run = session(model.file)
    kinds = {value.name: value.type for value in run.get_inputs()}
    given = {name: feeds[name] for name in kinds if name in feeds}
    wanted = run.run(list(model.outputs), given)
    with torch.no_grad():
        got = model(**{name: torch.from_numpy(np.asarray(value)) for name, value in feeds.items()})
    found = [got] if isinstance(got, torch.Tensor) else list(got.values())
    ratios = {n: sqnr(a, b.numpy()) for n, a, b in zip(model.outputs, wanted, found, strict=True)}
    worst = min(ratios, key=lambda name: ratios[name])
    if ratios[worst] < ENOUGH:
        reason = f"output '{worst}' of the imported module is {ratios[worst]:.1f} dB from ONNX Runtime's"
        raise ConfigError("onnx", model.file, reason=reason)
    return ratios


__all__ = ["prove_import", "quiet", "read", "session", "sqnr"]
