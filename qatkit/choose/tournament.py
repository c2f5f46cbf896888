"""The tournament of calibration methods: observes images once, compares the ranges of all methods, keeps the best.

    observe      a histogram of each tensor, over three quarters of the images
    per tensor   the error that each method's range causes at the outputs of the tensor's readers
                 (`qatkit.calibration.candidates`)
    whole model  the most promising methods, and the mix of each tensor's best, as ONNX files on the remaining
                 images: the metric where they have labels, and how far the outputs are from float's

With labels, a method must not be worse than min-max in the task's main metric, and must be within a standard
error of the best. Of these, the one with the smallest error of the outputs wins. Errors within 1 % are equal:
then min-max is preferred, before the other methods and the mix. The outputs decide, since a difference of one or two
images in a hundred is chance. The file is exported once, and its constants are replaced for each method.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, fx

from qatkit.calibration.candidates import (
    METHODS,
    MIXED,
    Ranges,
    apply,
    best_of_each,
    candidates,
    output_errors,
)
from qatkit.choose.contest import Entrant, Outcome, decided, judged
from qatkit.choose.judge import Judge, Runtime
from qatkit.choose.verdict import Verdict
from qatkit.graph.signature import Example
from qatkit.progress import Batches, shown
from qatkit.records.tried import Candidate

# Number of methods tried as a file (besides min-max and the mix), and of images that score each tensor's
# ranges.
FINALISTS = 3
SCORING_IMAGES, _AT_ONCE = 16, 4
# Relative difference below which errors are equal, for a hundred images.
_AS_GOOD = 0.01


def tournament(
    graph_module: fx.GraphModule,
    example: Example,
    observed: Batches,
    held_out: Batches,
    runtime: Runtime,
    folder: Path | None = None,
) -> list[Candidate]:
    """Sets the ranges of the best method in a graph whose histograms are filled.

    Args:
        graph_module: the prepared graph, calibrated by a histogram observer.
        example: the example input, as in `export_onnx`.
        observed: the (images, labels) batches of the calibration.
        held_out: other (images, labels) batches, which are read once per finalist.
        runtime: the settings of export and inference.
        folder: the folder in which the template is kept for another judge of the same model.

    Returns:
        All methods with their errors per tensor; only the finalists also have figures of the whole model.
    """
    offered, errors = _offered(graph_module, observed, runtime.progress)
    total = {title: fmean(errors[title].values()) for title in offered}
    ranked = sorted((t for t in offered if t not in ("min-max", MIXED)), key=total.__getitem__)
    finalists = [
        Entrant(title, partial(_with, graph_module, offered[title]))
        for title in ("min-max", *ranked[:FINALISTS], MIXED)
    ]
    with tempfile.TemporaryDirectory() as own:
        where, shared = folder or Path(own), folder is not None
        judge = Judge(graph_module, example, held_out, where, runtime, "calibrating", shared=shared)
        found = [judged(one, judge) for one in finalists]
    outcomes = decided({one.name: one.verdict for one in found}, least_error)
    apply(graph_module, offered[next(one.name for one in outcomes.values() if one.kept)])
    images = len(judge.wanted)
    return [_row(outcomes.get(title, Outcome(title)), total[title], images) for title in offered]


def _with(graph_module: fx.GraphModule, ranges: Ranges) -> fx.GraphModule:
    apply(graph_module, ranges)
    return graph_module


def _row(outcome: Outcome[Verdict], output_error: float, images: int) -> Candidate:
    verdict = outcome.verdict
    if verdict is None:
        return Candidate(outcome.name, output_error, None, None, False, images)
    return Candidate(outcome.name, output_error, verdict.score, verdict.error, outcome.kept, images)


def use(graph_module: fx.GraphModule, method: str, observed: Batches, progress: bool) -> None:
    """Sets the ranges of a method that an earlier tournament has chosen, in a graph whose histograms are filled."""
    known = _offered(graph_module, observed, progress)[0] if method == MIXED else candidates(graph_module)
    apply(graph_module, known[method])


def _offered(
    graph_module: fx.GraphModule, observed: Batches, progress: bool
) -> tuple[dict[str, Ranges], dict[str, dict[str, float]]]:
    """Returns the ranges of every method and of the mix, and their errors at the outputs of each tensor's readers."""
    offered = candidates(graph_module)
    errors = output_errors(graph_module, offered, scoring_images(observed, progress))
    offered[MIXED] = best_of_each(offered, errors)
    errors[MIXED] = {name: min(errors[title][name] for title in METHODS) for name in offered[MIXED]}
    return offered, errors


def scoring_images(batches: Batches, progress: bool) -> Iterator[Tensor]:
    """Yields the images that score each tensor's ranges, a few at a time."""
    images, labels = next(iter(batches))
    few = [
        part[:SCORING_IMAGES].split(_AT_ONCE) for part in (torch.as_tensor(images), torch.as_tensor(labels))
    ]
    for part, _ in shown(list(zip(*few, strict=True)), "calibrating: errors after each tensor", progress):
        yield part


def least_error(verdicts: Mapping[str, Verdict]) -> tuple[str, str]:
    """Returns the winning method (the first of equals) and the reason; min-max must be among the verdicts."""
    able = _accurate(verdicts)
    least = min(map(_error, able.values()))
    winner = next(name for name, one in able.items() if _error(one) <= least * (1 + _AS_GOOD))
    return winner, "the least output error among the equally accurate methods"


def _accurate(verdicts: Mapping[str, Verdict]) -> Mapping[str, Verdict]:
    """Returns the verdicts that are within a standard error of the best metric and not worse than min-max.

    Without labels all verdicts are returned.
    """
    scores = {name: one.score for name, one in verdicts.items() if one.score is not None}
    if not scores:
        return verdicts
    task, plain = verdicts["min-max"].task, scores["min-max"]
    metric = task.names.main
    best = metric.best(scores.values())
    winner = verdicts[next(name for name, score in scores.items() if score == best)]
    chance = task.spread(best, len(winner.same), winner.values)
    return {
        name: verdicts[name]
        for name, score in scores.items()
        if metric.lost(best, score) <= chance and metric.lost(plain, score) <= 0
    }


def _error(verdict: Verdict) -> float:
    return math.inf if verdict.error is None else verdict.error
