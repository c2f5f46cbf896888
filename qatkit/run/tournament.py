"""The tournament of calibration methods: one pass over the images, every method's ranges, the best ones kept.

    observe      a histogram of each tensor, over three quarters of the images
    per tensor   the error that each method's range causes behind the tensor (`calibration.candidates`)
    whole model  the most promising methods, and the mix of each tensor's best, as ONNX files on the images left
                 over: top-1 where they have labels, and how far the logits are from the float model's

Of those that are not worse than min-max in top-1, and within a standard error of the best, the one with the
least error of the logits wins, of equals (1 %) the first, the mix last: a difference of one or two images in a
hundred is chance, the logits are not.
The file is exported once; each method only refills its constants.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, fx

from qatkit import verify
from qatkit.calibration.candidates import METHODS, MIXED, apply, best_of_each, candidates, output_errors
from qatkit.config.schema import ExportConfig
from qatkit.export.torch_to_onnx import export_onnx, refill
from qatkit.graph.convert import convert
from qatkit.graph.phase import inference, set_phase
from qatkit.progress import Batches, shown
from qatkit.verify.results import Candidate
from qatkit.verify.session import FloatArray, run_images

# Methods (beside min-max and the mix) that are tried as a file, and images that judge each tensor's ranges.
FINALISTS = 3
SCORING_IMAGES, _AT_ONCE = 16, 4
# Errors of logits that differ by less are equal, for a hundred images: a method that can be named comes before a mix.
_AS_GOOD = 0.01


@dataclass(frozen=True)
class Runtime:
    """How the files are made and run; of images without labels no top-1 is counted."""

    export: ExportConfig
    options: Mapping[str, str]
    threads: int
    progress: bool
    labelled: bool = True


def tournament(
    graph_module: fx.GraphModule,
    example: Tensor,
    observed: Batches,
    held_out: Batches,
    runtime: Runtime,
) -> list[Candidate]:
    """Gives a graph whose histograms are filled the ranges of the best method.

    Args:
        graph_module: prepared and calibrated by a histogram observer.
        example: as `export_onnx` takes it.
        observed: (images, labels) batches that were calibrated on.
        held_out: (images, labels) batches that were not; gone through once a finalist.

    Returns:
        All methods, the finalists with their figures.
    """
    offered = candidates(graph_module)
    errors = output_errors(graph_module, offered, scoring_images(observed, runtime.progress))
    offered[MIXED] = best_of_each(offered, errors)
    errors[MIXED] = {name: min(errors[title][name] for title in METHODS) for name in offered[MIXED]}
    total = {title: fmean(errors[title].values()) for title in offered}
    ranked = sorted((t for t in offered if t not in ("min-max", MIXED)), key=total.__getitem__)
    wanted = float_logits(graph_module, shown(held_out, "calibrating: float", runtime.progress))
    rows = {title: Candidate(title, total[title], None, None, False, len(wanted)) for title in offered}
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.onnx"
        finalists = ("min-max", MIXED, *ranked[:FINALISTS])
        for title in finalists:
            apply(graph_module, offered[title])
            path = _write(graph_module, example, template, runtime)
            batches = shown(held_out, f"calibrating: {title}", runtime.progress)
            rows[title] = _measure(path, batches, wanted, rows[title], runtime)
    winner = choose([row for title, row in rows.items() if title in finalists])
    apply(graph_module, offered[winner])
    return [replace(row, chosen=row.method == winner) for row in rows.values()]


def scoring_images(batches: Batches, progress: bool) -> Iterator[Tensor]:
    """The images that judge each tensor's ranges, a few at a time."""
    images, labels = next(iter(batches))
    few = [
        part[:SCORING_IMAGES].split(_AT_ONCE) for part in (torch.as_tensor(images), torch.as_tensor(labels))
    ]
    for part, _ in shown(list(zip(*few, strict=True)), "calibrating: errors behind tensors", progress):
        yield part


def choose(finalists: Iterable[Candidate]) -> str:
    """The method that wins; min-max is among `finalists`, which have figures. Of equals the first one."""
    tried = {row.method: row for row in finalists}
    able = _accurate(tried)
    error = min(map(_error, able))
    return next(row.method for row in able if _error(row) <= error * (1 + _AS_GOOD))


def _accurate(tried: Mapping[str, Candidate]) -> list[Candidate]:
    """Those within a standard error of the best top-1, and not below min-max; without labels all of them."""
    if all(row.top1 is None for row in tried.values()):
        return list(tried.values())
    best = max(_top1(row) for row in tried.values())
    images = next(iter(tried.values())).images
    chance = 100 * math.sqrt(best / 100 * (1 - best / 100) / images)
    least = max(best - chance, _top1(tried["min-max"]))
    return [row for row in tried.values() if _top1(row) >= least]


def _error(row: Candidate) -> float:
    error = row.logit_error
    return math.inf if error is None or math.isnan(error) else error


def _top1(row: Candidate) -> float:
    return -math.inf if row.top1 is None else row.top1


def float_logits(graph_module: fx.GraphModule, batches: Batches) -> FloatArray:
    """[N, classes] of the prepared graph with quantization off."""
    device = next((p.device for p in graph_module.parameters()), torch.device("cpu"))
    with inference(graph_module):
        set_phase(graph_module, observe=False, quantize=False)
        found = [graph_module(images.to(device)).float().cpu().numpy() for images, _ in batches]
    return np.concatenate(found)


def _write(graph_module: fx.GraphModule, example: Tensor, template: Path, runtime: Runtime) -> Path:
    """The file of the present ranges; the first one is the template of the others."""
    converted = convert(graph_module).graph
    path = template.with_name("candidate.onnx") if template.exists() else template
    if path != template:
        try:
            refill(template, converted, path)
            return path
        except ValueError:
            pass  # a bias that does not fit int32 gave its weight a scale a channel: another graph
    export_onnx(
        converted, example, path, opset=runtime.export.opset,
        dynamic_batch=runtime.export.dynamic_batch, template=True,
    )  # fmt: skip
    return path


def _measure(path: Path, batches: Batches, wanted: FloatArray, row: Candidate, runtime: Runtime) -> Candidate:
    session = verify.open_session(path, threads=runtime.threads, options=runtime.options)
    logits, right = [], 0
    for images, labels in batches:
        logits.append(run_images(session, images))
        right += int((logits[-1].argmax(1) == np.asarray(labels)).sum())
    difference = np.concatenate(logits).astype(np.float64) - wanted
    size = float(np.square(wanted - wanted.mean(1, keepdims=True)).mean())
    error = (
        float(np.square(difference).mean()) / size if size else None
    )  # equal logits: nothing to compare with
    return replace(row, top1=100 * right / len(wanted) if runtime.labelled else None, logit_error=error)
