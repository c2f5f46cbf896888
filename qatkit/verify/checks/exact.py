"""Provides the file at accuracy level 0, at which it computes the same as the module, to compare the two.

A file shipped at level 4 rounds the activations of its products with packed weights to 8 bits. The cost of
that is measured separately (`qatkit.verify.accuracy_levels`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from qatkit.records.results import Results
from qatkit.verify.checks.base import Subject

LEVEL = "accuracy_level"  # the key of the measured figures in reports and manifests


def is_rounded(results: Results) -> bool:
    """Returns whether the file of these results has an accuracy level other than 0."""
    return bool(results.measured.get(LEVEL, {}).get("level", 0))


@contextmanager
def exact(subject: Subject, results: Results) -> Iterator[Subject]:
    """Yields the subject, whose int8 file is replaced by a temporary copy at accuracy level 0 if needed.

    The file is replaced if it has another level and was made from a module.
    """
    if subject.reference is None or not is_rounded(results):
        yield subject
        return
    from qatkit.export.accuracy_level import FLOAT, at_level

    with tempfile.TemporaryDirectory() as folder:
        file = subject.files["int8"]
        at_level(file, level_0 := Path(folder) / file.name, FLOAT)
        yield replace(subject, files={**subject.files, "int8": level_0})
