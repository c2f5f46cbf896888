"""Compares the file with ONNX Runtime's dynamic int8 quantization of the float file, which may suffice.

The dynamic file (`verify.dynamic`) is one of the measured files. So its figures are rows of the table, and
come from the same rounds and images as those of the other files.
"""

from __future__ import annotations

from typing import Any

from qatkit.records.results import DYNAMIC, Results
from qatkit.verify.checks.requested import RequestedSettings


def dynamic_line(results: Results) -> str:
    """Returns a comparison with the dynamic file, and the bounds it would have missed or met; "" without one."""
    found, metric = results.measured.get(DYNAMIC), results.task.main
    if found is None:
        return ""
    change, interval = metric.change(found["lost"]), found["interval"]
    compared = [
        f"{metric.name} {change:+.2f} {metric.points}".rstrip() + f", +/- {interval:.2f}, against float"
    ]
    if ratio := _speed(results):
        compared.append(f"{ratio:.2f} times as fast as {results.label}")
    if DYNAMIC in results.sizes and results.sizes.get("int8"):
        compared.append(f"{results.sizes[DYNAMIC] / results.sizes['int8']:.2f} of its size")
    return f"ONNX Runtime's dynamic int8 of the float file: {', '.join(compared)}{_verdict(results, found)}"


def _speed(results: Results) -> float | None:
    """Returns the speed of the dynamic file relative to the int8 file; None if it was not measured."""
    mine, other = results.latency.get("int8"), results.latency.get(DYNAMIC)
    return None if mine is None or other is None else other.ratio / mine.ratio


def _verdict(results: Results, found: dict[str, Any]) -> str:
    """Returns the bounds on accuracy, size and speed that the dynamic file misses, else those that it meets.

    It is "" if no bound is set.
    """
    asked, latency, sizes = RequestedSettings(results), results.latency.get(DYNAMIC), results.sizes
    ratio = sizes[DYNAMIC] / sizes["float"] if DYNAMIC in sizes and sizes.get("float") else None
    # Values with signs: the product of value and sign must not exceed that of bound and sign.
    figures = {
        "max_drop": (round(found["lost"], 6), 1),
        "max_size_ratio": (ratio, 1),
        "min_speedup": (latency.ratio if latency else None, -1),
    }
    met: dict[bool, list[str]] = {True: [], False: []}
    for key, (value, sign) in figures.items():
        bound = asked.get(f"verify.{key}")
        if value is not None and bound is not None:
            met[sign * value <= sign * bound].append(f"verify.{key}={bound:g}")
    if met[False]:
        return f"; it would not have met {' and '.join(met[False])}"
    return f"; it would have met {' and '.join(met[True])}" if met[True] else ""
