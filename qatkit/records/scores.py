"""The key of a task's main metric in records: `score` for every task.

report.json, which other programs read, and older checkpoints and ladders have the metric's own key instead (such
as top1). Both forms are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qatkit_verify.classification import TOP1
from qatkit_verify.records import Metric

SCORE, FLOAT_SCORE = "score", "float_score"


def with_score(row: Mapping[str, Any], metric: Metric = TOP1) -> dict[str, Any]:
    """Returns a row with `score` in place of the main metric's own key, if it has that key."""
    return {SCORE if key == metric.key else key: value for key, value in row.items()}


def with_key(record: Any, metric: Metric) -> Any:
    """Returns plain containers with the metric's own key in place of `score`, at any depth."""
    if isinstance(record, Mapping):
        names = {SCORE: metric.key, FLOAT_SCORE: f"float_{metric.key}"}
        return {names.get(key, key): with_key(value, metric) for key, value in record.items()}
    return [with_key(one, metric) for one in record] if isinstance(record, list | tuple) else record
