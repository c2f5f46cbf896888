"""Checks how well the files, the simulation and a float control perform the task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qatkit.records.results import DYNAMIC, Results
from qatkit.verify.checks.base import Check, Shortfall, Speeds, Subject
from qatkit.verify.checks.dynamic import dynamic_line
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.classification import TOP1

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig
    from qatkit.tasks import Task
    from qatkit.verify.accuracy import Predictor
    from qatkit_verify.records import Scores

PAIRED = "paired"  # the key of the figures of `_paired` among the measured ones
_FEWEST = 3  # minimum number of classes: with two, the worse one is obvious


class AccuracyCheck(Check):
    """The task's metrics; `verify.max_drop` bounds the loss of the main one. Without labels see `FidelityCheck`."""

    name = "accuracy"

    def measure(self, subject: Subject, results: Results) -> Results:
        from qatkit.verify.accuracy import accuracies, all_cores, file_predictor, in_parts
        from qatkit_verify.session import open_session

        if not subject.labelled:
            return results
        sessions = {
            name: open_session(path, threads=all_cores(), options=subject.options)
            for name, path in subject.files.items()
        }
        runs = {name: in_parts(file_predictor(s, subject.task)) for name, s in sessions.items()}
        runs |= {name: in_parts(predict) for name, predict in self.predictors(subject).items()}
        values: dict[str, list[Any]] = {name: [] for name in subject.files}
        found = accuracies(runs, subject.batches(), subject.progress, task=subject.task, values=values)
        results = replace(results, accuracy=found)
        for name, key in ((PAIRED, "int8"), (DYNAMIC, DYNAMIC)):
            if key in values:
                results = results.with_measured(name, _paired(values, found, subject.task, key))
        return results

    def estimate(self, settings: VerifyConfig, speeds: Speeds) -> float:
        return speeds.images * speeds.each(*speeds.files, *speeds.predictors) if speeds.labelled else 0.0

    def predictors(self, subject: Subject) -> Mapping[str, Predictor]:
        """Returns the predictors whose accuracy is measured in addition to that of the files."""
        return subject.predictors

    def lines(self, results: Results) -> list[str]:
        lines = (_chance_line(results), _paired_line(results), dynamic_line(results), class_line(results))
        return [line for line in lines if line]

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        if bounds.max_drop is None or not results.labelled:
            return []
        reference, int8 = results.accuracy.get("float"), results.accuracy.get("int8")
        if reference is None or int8 is None:
            return [Shortfall(f"verify.max_drop={bounds.max_drop}: accuracy was not measured")]
        metric = results.task.main
        drop = round(
            metric.lost(reference.score, int8.score), 6
        )  # rounded, since 78.5 - 78.3 is a little more than 0.2 in binary
        if drop <= bounds.max_drop:
            return []
        line = (
            f"verify.max_drop={bounds.max_drop}: {results.label} {metric.name} {int8.score:.2f} is {drop:.2f}"
            f" {metric.points} {metric.below} float {reference.score:.2f}"
        )
        asked, control = RequestedSettings(results), results.accuracy.get("control")
        lost = 0.0 if control is None else round(metric.lost(reference.score, control.score), 6)
        return [Shortfall(line, asked.gentler(lost) if lost > 0 and 2 * lost >= drop else asked.closer())]


def _paired(
    values: Mapping[str, list[Any]], scores: Mapping[str, Scores], task: Task, key: str
) -> dict[str, float]:
    """Returns how much worse a file's main metric is than float's, and two standard errors of this difference."""
    import numpy as np

    exact, found = (np.concatenate(values[name]) for name in ("float", key))
    lost = task.names.main.lost(scores["float"].score, scores[key].score)
    return {"lost": lost, "interval": 2 * task.noise(exact, found)}


def _paired_line(results: Results) -> str:
    """Returns the difference from float and its uncertainty; "" without labels."""
    found, metric = results.measured.get(PAIRED), results.task.main
    if found is None:
        return ""
    change, interval = round(metric.change(found["lost"]), 2) + 0.0, found["interval"]  # never "-0.00"
    unit = f" {metric.points}" if metric.points else ""
    return (
        f"{results.label} {metric.name} against float: {change:+.2f}{unit}, +/- {interval:.2f} (two standard errors,"
        f" the same {results.task.samples} for both)"
    )


def _chance_line(results: Results) -> str:
    found = results.accuracy.get("float")
    if found is None or results.task.main.key != TOP1.key:
        return ""
    return chance_text(found.score, found.class_images, results.task.samples)


def chance_text(score: float, class_images: Sequence[int], samples: str) -> str:
    """Returns a clause if float's top-1 is not measurably better than naming one class for all; else "".

    Args:
        score: the top-1 accuracy of the float model in percent.
        class_images: the number of test samples of each class.
        samples: what samples are called, in the plural.
    """
    if not sum(class_images):
        return ""
    chance = max(class_images) / sum(class_images)
    error = math.sqrt(chance * (1 - chance) / sum(class_images))
    if score > 100 * (chance + 2 * error):
        return ""
    return (
        f"float top-1 of {score:.2f} % is not measurably better than one answer for all {samples}"
        f" ({100 * chance:.2f} %), so the comparison says nothing: the model is untrained, or its classes are in"
        " another order than the labels"
    )


class FilesAccuracyCheck(AccuracyCheck):
    """The accuracy check for the files only; the simulation, which takes most of the time, is left out."""

    def estimate(self, settings: VerifyConfig, speeds: Speeds) -> float:
        return super().estimate(settings, replace(speeds, predictors=()))

    def predictors(self, subject: Subject) -> Mapping[str, Predictor]:
        return {}


def class_line(results: Results, count: int = 5) -> str:
    """Returns the worst classes of the file in one line; "" without labels or with too few classes."""
    int8, reference = results.accuracy.get("int8"), results.accuracy.get("float")
    if int8 is None or len(int8.class_images) < _FEWEST:
        return ""
    shares, before = _shares(int8), {} if reference is None else _shares(reference)
    told = [
        f"{results.classes[label] if label < len(results.classes) else label}"
        f": {shares[label]:.1f} % of {int8.class_images[label]:,}"
        + (f" (float {before[label]:.1f} %)" if label in before else "")
        for label in sorted(shares, key=shares.__getitem__)[:count]
    ]
    return f"worst classes by {results.label} {results.task.main.name}: {'; '.join(told)}" if told else ""


def _shares(scores: Scores) -> dict[int, float]:
    """Returns the percentage correct of each class that has images."""
    pairs = enumerate(zip(scores.class_right, scores.class_images, strict=True))
    return {label: 100 * right / images for label, (right, images) in pairs if images}
