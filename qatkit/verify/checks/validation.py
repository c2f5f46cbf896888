"""Measures quality on held-out training images; unlike test images, they may decide between files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qatkit.records.figures import VALIDATION
from qatkit.records.results import Fidelity, Results
from qatkit.verify.checks.base import Check, Subject
from qatkit.verify.checks.fidelity import fidelity_text


class ValidationCheck(Check):
    """Accuracy of the files, and fidelity to the float file, on images used neither to train nor to calibrate.

    The check is skipped if no images are held out (`verify.validation`). Without labels there is no accuracy.
    """

    name = VALIDATION

    def measure(self, subject: Subject, results: Results) -> Results:
        from qatkit.verify.accuracy import accuracies, all_cores, file_predictor, in_parts
        from qatkit.verify.fidelity import fidelity
        from qatkit_verify.session import open_session

        if subject.held_out is None:
            return results
        runs = {
            name: in_parts(
                file_predictor(open_session(path, threads=all_cores(), options=subject.options), subject.task)
            )
            for name, path in subject.files.items()
        }
        near = fidelity(
            runs["float"], {"int8": runs["int8"]}, subject.held_out(), subject.progress, task=subject.task
        )
        right = {}
        if subject.labelled:
            right = accuracies(runs, subject.held_out(), subject.progress, task=subject.task)
        found = {
            "accuracy": {row: one.as_dict() for row, one in right.items()},
            "fidelity": {row: asdict(one) for row, one in near.items()},
        }
        return results.with_measured(self.name, found)

    def lines(self, results: Results) -> list[str]:
        found: dict[str, Any] | None = results.measured.get(self.name)
        if found is None:
            return []
        near = Fidelity(**found["fidelity"]["int8"])
        metric = results.task.main
        scores = "".join(
            f"{label} {metric.name} {found['accuracy'][row][metric.key]:.2f}, "
            for row, label in (("float", "float"), ("int8", results.label))
            if row in found["accuracy"]
        )
        return [
            f"on {near.images:,} held-out training {results.task.samples}: {scores}{fidelity_text(near, results.task)}"
        ]
