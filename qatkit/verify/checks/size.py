"""Measures how large the file is compared with the float file."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from qatkit.records.fixes import Fix
from qatkit.records.results import MIXED_SCALES, Results
from qatkit.verify.checks.base import Check, Shortfall, Subject
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.errors import counted

if TYPE_CHECKING:
    from qatkit.config.schema import VerifyConfig


class SizeCheck(Check):
    """File sizes in bytes; the bound is `verify.max_size_ratio`."""

    name = "size"
    early = True

    def measure(self, subject: Subject, results: Results) -> Results:
        return replace(results, sizes={name: path.stat().st_size for name, path in subject.files.items()})

    def shortfalls(self, bounds: VerifyConfig, results: Results) -> list[Shortfall]:
        if bounds.max_size_ratio is None:
            return []
        ratio = results.size_ratio
        if ratio is None:
            return [Shortfall(f"verify.max_size_ratio={bounds.max_size_ratio}: sizes were not measured")]
        if ratio <= bounds.max_size_ratio:
            return []
        file = f"the {results.label} file has {ratio:.3f} times the size of the float file"
        return [Shortfall(f"verify.max_size_ratio={bounds.max_size_ratio}: {file}", _fixes(ratio, results))]


def _fixes(ratio: float, results: Results) -> list[Fix]:
    asked = RequestedSettings(results)
    if not results.config:
        return []
    if asked.left_float():
        return [asked.without_float()]
    if asked.mode == "float16":
        return [Fix((f"{asked.mode_key}=weight_only",), "one byte per weight instead of two")]
    mixed = sum(reason.startswith(MIXED_SCALES) for _, reason in results.skipped)
    if mixed:
        quantizes = f"quantizes {counted(mixed, 'operator')} that calibration left in float"
        longer = "a longer float training, if the float model is not good yet"
        return [Fix(("calibration.mixed_scales=report",), quantizes), Fix(note=longer)]
    met = math.ceil(1000 * ratio) / 1000
    reached = "the ratio of this file; no override keeps operators in float"
    return [Fix((f"verify.max_size_ratio={met}",), reached)]
