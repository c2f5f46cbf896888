"""Takes one model of the list, and its twin, through capture, training step, export and audit; returns its figures.

status  through    an INT8 file was written, and nothing below applies
        refused    a one-line ConfigError, or a one-line ValueError that qatkit raised itself
        wrong      something computes other values than the model, without an error or note
        traceback  any other exception
        killed     the process crashed or exceeded the time limit (`run.py` writes this status)
"""

from __future__ import annotations

import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import qatkit
from qatkit.config.schema import ScheduleConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.phase import set_phase
from qatkit.graph.trace import copy_of
from qatkit.quant.backends import FBGEMM
from qatkit.records.results import Audit
from qatkit.train.module import QATModule
from qatkit.verify.audit import audit
from qatkit_verify.errors import ConfigError
from zoo.compare import TOLERANCE, File, arrays, difference, leaves, relative, same_choice, snr
from zoo.entry import Entry, call
from zoo.settle import has_random_training, in_training, settled
from zoo.sizes import at_other_sizes

Row = dict[str, Any]
CALIBRATION, TEST = (100, 101), (200, 201)  # seeds
BATCH = 8
# Below this SNR (dB) against the converted module, an INT8 file computes something else.
SAME_FILE = 20.0
QATKIT = str(Path(qatkit.__file__).parent)
ROOT = Path(__file__).parents[2]  # removed from errors, so that the page has no paths of this machine


def measure(entry: Entry) -> Row:
    """Returns the row of one model."""
    row: Row = {"about": entry.about, "stage": "build", "expected": entry.refused}
    start = time.monotonic()
    # Unlike trained models, random weights produce denormal values, which are a hundred times as slow.
    torch.set_flush_denormal(True)
    try:
        model = settled(entry)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        _through(entry, model, row)
        if entry.twin is not None:
            _compare_twin(entry, entry.twin(model).eval(), row)
        row["status"] = "wrong" if row["wrong"] else "through"
    except Exception as error:
        row |= _failure(error)
        if row.get("wrong"):
            row["status"] = "wrong"  # no error reported the wrong values, even if a later stage failed
    row["seconds"] = round(time.monotonic() - start, 1)
    return row


def _failure(error: Exception) -> Row:
    """Returns the status, message and place in the code of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if f.filename.startswith(QATKIT)), frames[-1])
    raised_here = frames[-1].filename.startswith(QATKIT)
    said = isinstance(error, ConfigError) or (isinstance(error, ValueError) and raised_here)
    text = str(error).strip().replace(f"{ROOT}/", "")
    text = re.sub(r"\S*/site-packages/", "", text)
    refused = said and bool(text) and "\n" not in text
    place = f"{Path(last.filename).name}:{last.lineno}"
    return {
        "status": "refused" if refused else "traceback",
        "error": text[:1500] if refused else f"{type(error).__name__}: {text[:400]}",
        "place": place,
    }


def _through(entry: Entry, model: nn.Module, row: Row) -> None:
    row["stage"], row["wrong"] = "capture", []
    start = time.process_time()
    captured = Captured(model, entry.batch(2, 0), "auto")
    module = _prepared(entry, captured)
    row["capture_seconds"] = round(time.process_time() - start, 2)
    row["wrong"] += [f"capture: {line}" for line in _capture(entry, model, module)]
    if has_random_training(model, entry.batch(2, 0)):
        row["stage"] = "capture in training mode"
        row["wrong"] += [f"training mode: {line}" for line in _training(entry, model)]
    row["stage"] = "calibration"
    module.calibrate([entry.batch(BATCH, seed) for seed in CALIBRATION])
    row["stage"] = "training step"
    row["no_gradient"] = _without_gradient(entry, model, module)
    row["stage"] = "convert"
    converted = module.convert().graph
    with tempfile.TemporaryDirectory() as folder:
        row |= _files(entry, captured, converted, Path(folder), row)


def _prepared(entry: Entry, model: nn.Module | Captured) -> QATModule:
    return QATModule(model, entry.batch(2, 0), ScheduleConfig(batch_norm="freeze"))


def _capture(entry: Entry, model: nn.Module, module: QATModule) -> list[str]:
    """Returns one line for each of three batches on which the prepared graph, unquantized, differs from the model."""
    module.eval()
    set_phase(module.graph, observe=False, quantize=False)
    found = []
    with torch.no_grad():
        for count, seed in ((2, 0), (1, 11), (3, 12)):
            batch = entry.batch(count, seed)
            expected, given = call(model, batch), module.graph(*leaves(entry.batch(count, seed)))
            # The graph has auxiliary heads only in training.
            outputs = arrays(expected)[:1] if hasattr(module.graph, "auxiliary_outputs") else arrays(expected)
            if line := difference(outputs, arrays(given), _rounding(model, batch)):
                found.append(f"batch of {count}: {line}")
    set_phase(module.graph, observe=True, quantize=True)
    return found


def _rounding(model: nn.Module, batch: Any) -> float:
    """Returns the relative difference of an output that rounding may cause.

    It depends on the types of the weights, and is at least ten times the difference between the model and its float64
    copy, since random weights can amplify rounding a million times.
    """
    types = [p.dtype for p in model.parameters() if p.is_floating_point()]
    known = max([TOLERANCE, *(4 * torch.finfo(dtype).eps for dtype in types)])
    try:
        exact = arrays(call(copy_of(model).double(), _doubled(batch)))
    except (RuntimeError, TypeError):  # the model requires float32
        return known
    own = [
        relative(a, b) for a, b in zip(exact, arrays(call(model, batch)), strict=True) if a.dtype.kind == "f"
    ]
    return max([known, *(10 * size for size in own)])


def _doubled(value: Any) -> Any:
    """Returns inputs of the same structure with float32 tensors as float64."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype is torch.float32 else value
    if isinstance(value, Mapping):
        return {key: _doubled(part) for key, part in value.items()}
    return type(value)(map(_doubled, value)) if isinstance(value, (tuple, list)) else value


def _training(entry: Entry, model: nn.Module) -> list[str]:
    """Returns what is wrong with a model captured in training mode.

    Its graph must agree with the model in evaluation, and be random in training if the model is.
    """
    model.train()
    module = _prepared(entry, model)
    model.eval()
    found = _capture(entry, model, module)
    set_phase(module.graph, observe=False, quantize=False)
    # Random numbers drawn, or state kept, outside of modules are not part of the graph, and a note says so.
    if not module.notes and not has_random_training(_Flat(module.graph), tuple(leaves(entry.batch(2, 0)))):
        found.append("nothing is random in training any more")
    return found


class _Flat(nn.Module):
    """A graph as a model with positional tensor arguments."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *tensors: Any) -> Any:
        return self.graph(*tensors)


def _without_gradient(entry: Entry, model: nn.Module, module: QATModule) -> list[str]:
    """Returns the parameters that lose their gradient with fake quantization.

    In a float step their gradient is not zero; with fake quantization it is missing, zero or not finite. The result is
    [] if the float model has no backward pass.
    """
    batch = entry.batch(4, 3)
    with torch.enable_grad():
        try:
            _step(call(model, batch))
            dead = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        except RuntimeError:  # the model overwrites values that its backward pass needs
            dead = {name for name, _ in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        with in_training(module):
            module.ready_to_convert()
            _step(module.graph(*leaves(entry.batch(4, 3))))
    found = [
        name
        for name, p in module.graph.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.isfinite().all() or not p.grad.any())
    ]
    module.zero_grad(set_to_none=True)
    return sorted(set(found) - dead)


def _step(outputs: Any) -> None:
    """Runs the backward pass of a loss on all float outputs."""
    losses = [
        (one.float() ** 2).mean() for one in leaves(outputs) if one.is_floating_point() and one.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()


def _files(entry: Entry, captured: Captured, converted: fx.GraphModule, folder: Path, row: Row) -> Row:
    """Compares the float file with the model and the INT8 file with the converted module; returns figures."""
    int8, plain, example = folder / "int8.onnx", folder / "float.onnx", entry.batch(2, 0)
    model = captured.model
    row["stage"] = "export"
    start = time.process_time()
    opset, not_free = _export(converted, example, int8, entry.opset)
    row["export_seconds"] = round(time.process_time() - start, 2)
    row["stage"] = "float export"
    not_free = export_onnx(float_baseline(captured.graph(), example), example, plain, opset=opset) or not_free
    row["stage"] = "run"
    tests = [entry.batch(BATCH, seed) for seed in TEST]
    with torch.no_grad():
        exact = _joined([arrays(call(model, batch)) for batch in tests])
        simulated = _joined([arrays(converted(*leaves(batch))) for batch in tests])
    exact = exact[: len(simulated)]  # without auxiliary heads
    off, on = (_joined([File(int8, optimize=o)(batch) for batch in tests]) for o in (False, True))
    of_float = _joined([File(plain, optimize=True)(batch) for batch in tests])
    with torch.no_grad():
        rounding = max(_rounding(model, batch) for batch in tests)
    if line := difference(exact, of_float, rounding):
        row["wrong"].append(f"float file: {line}")
    for name, found in (("off", off), ("on", on)):
        distance = snr(simulated, found)
        # If only rounding makes the difference, the file is as close to the float model as the module is.
        worse = (snr(exact, found) or 0.0) < (snr(exact, simulated) or 0.0) - 1.0
        if distance is not None and distance < SAME_FILE and worse:
            row["wrong"].append(
                f"file, optimizations {name}, against the converted module: {distance:.1f} dB"
            )
    row["stage"] = "other sizes"
    near = snr(simulated, off)
    free = () if not_free else converted.meta["free_axes"]
    sized = at_other_sizes(entry, model, converted, (plain, int8), free, rounding=_rounding, near=near)
    row["wrong"] += sized.pop("wrong")
    row["stage"] = "audit"
    audited = audit(
        int8, options=FBGEMM.session_options, input_shape=File(int8, optimize=False).feed(tests[0])
    )
    row["stage"] = "done"
    return {
        **sized,
        "not_free": not_free,
        "opset": opset,
        "snr": snr(exact, on),
        "parity": [same_choice(simulated, off), same_choice(simulated, on)],
        "distance": [near, snr(simulated, on)],
        "size_ratio": int8.stat().st_size / plain.stat().st_size,
        "nodes": len(audited.nodes),
        "macs": audited.macs,
        "int8_share": audited.int8_share,
        "problems": list(audited.problems),
        "floats": floats(audited),
    }


def _export(converted: nn.Module, example: Any, path: Path, lowest: int) -> tuple[int, str]:
    """Writes the INT8 file at opset 13, or at the entry's lowest opset if the error for 13 names that one.

    Returns the opset, and why axes that may have any size got the example's size in the file ("" if they did not).
    """
    try:
        return 13, export_onnx(converted, example, path)
    except ValueError as error:
        if lowest == 13 or str(lowest) not in str(error):
            raise
        return lowest, export_onnx(converted, example, path, opset=lowest)


def _joined(batches: list[list[Any]]) -> list[Any]:
    """Returns each output over all batches, concatenated."""
    import numpy as np

    return [
        np.concatenate(parts) if parts[0].ndim else np.stack(parts) for parts in zip(*batches, strict=True)
    ]


def floats(audit: Audit) -> dict[str, int]:
    """Returns the number of float operators by "operator: reason".

    It counts those with multiply-accumulates or a reason, except those that ONNX Runtime inserted.
    """
    found = [
        f"{n.op}: {n.reason.split(' (it ')[0] or 'no reason given'}"
        for n in audit.nodes
        if n.precision == "float" and (n.macs or n.reason) and "inserted by" not in n.reason
    ]
    return dict(Counter(found).most_common())


def _compare_twin(entry: Entry, twin: nn.Module, row: Row) -> None:
    """Takes the twin through the same chain, and adds its SNR and int8 share to the row."""
    row["stage"] = "twin"
    of_twin: Row = {"wrong": []}
    _through(entry, twin, of_twin)
    row["twin_snr"], row["twin_int8_share"] = of_twin["snr"], of_twin["int8_share"]
    row["stage"] = "done"
