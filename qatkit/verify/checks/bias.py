"""Measures whether INT8 outputs of a regression are above or below float's, overall and by target range.

    shift = mean(INT8 - float); beyond noise if it is more than three times its standard error

An error with a constant sign does not average out like noise, and a metric of single samples hides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qatkit.records.fixes import Fix, either
from qatkit.records.results import Results
from qatkit.tasks.regression import Regression, columns
from qatkit.verify.checks.base import Check, Shortfall, Subject
from qatkit.verify.checks.requested import RequestedSettings
from qatkit_verify.errors import counted

if TYPE_CHECKING:
    from qatkit.tasks.base import Array

NAME = "bias"
FIX = Fix(("algorithm=bias_correction",))
_LOOKED_AT = 2048  # number of test samples
_RANGES = 5  # number of target ranges: quintiles
_SURE = 3.0  # standard errors
_MATTERS = 0.005  # share of the targets' standard deviation; a smaller shift is not worth a fix
_HALF = 0.5  # a shift of at least this share of a drop explains the drop
_FEWEST = 20  # minimum number of samples for a meaningful standard error
_LOOSE = 0.25  # share of the targets' standard deviation; a larger bound hardly bounds anything


class BiasCheck(Check):
    """The mean shift for `task=regression` and tasks derived from it; it has no bound."""

    name = NAME

    def measure(self, subject: Subject, results: Results) -> Results:
        import numpy as np

        if not isinstance(subject.task, Regression):
            return results
        exact, found, targets = _outputs(subject)
        if not np.isfinite(found).all():  # the accuracy or fidelity check reports this
            return results
        by = targets if subject.labelled else exact
        deviations = subject.task.deviations or tuple(exact.std(0))
        rows = [
            {
                "name": f"value {place + 1}" if exact.shape[1] > 1 else "",
                "deviation": float(deviations[place]),
                **_shift(found[:, place] - exact[:, place]),
                "ranges": _ranges(by[:, place], found[:, place] - exact[:, place]),
            }
            for place in range(exact.shape[1])
        ]
        figures = {"samples": len(exact), "by": "target" if subject.labelled else "float output"}
        return results.with_measured(NAME, {**figures, "outputs": rows})

    def explains(self, shortfall: Shortfall, results: Results) -> list[Fix] | None:
        found, drop = results.measured.get(NAME), _drop(results)
        if found is None or drop is None or not shortfall.line.startswith("verify.max_drop"):
            return None
        largest = max((abs(one["shift"]) for one in found["outputs"] if _beyond(one, one)), default=0.0)
        return fixes_of(results) or None if largest >= _HALF * drop else None

    def lines(self, results: Results) -> list[str]:
        found = results.measured.get(NAME)
        if found is None:
            return []
        told = [line for one in found["outputs"] for line in _texts(one, found["by"], results.label)]
        none = (
            f"the outputs of {results.label} have no mean shift against float beyond noise on"
            f" {counted(found['samples'], 'sample')}"
        )
        fix = either(fixes_of(results))
        taken = [f"to correct the shift: {fix}"] if fix else []
        return [*(told or [none]), *taken, *_loose(found, results)]


def fixes_of(results: Results) -> list[Fix]:
    """Returns the setting that removes the shifts; [] if no shift matters, it is already set, or it does not apply."""
    found, asked = results.measured.get(NAME), RequestedSettings(results)
    if found is None or not asked.has_module or asked.weights_alone:
        return []
    parts = [(part, one) for one in found["outputs"] for part in (one, *one["ranges"])]
    matters = any(
        _beyond(part, one) and abs(part["shift"]) >= _MATTERS * one["deviation"] for part, one in parts
    )
    used = asked.get("algorithm") or {}
    return [FIX] if matters and "bias_correction" not in used else []


def rows_of(output: Mapping[str, Any], by: str) -> list[tuple[str, ...]]:
    """Returns a row for all samples and one for each range.

    The cells of a row are its name, the number of samples, the mean shift, two standard errors, the ratio of
    the shift to the targets' standard deviation, and "beyond noise" or "".
    """
    rows = [("all", output)]
    rows += [(f"{by} {one['low']:.4g} to {one['high']:.4g}", one) for one in output["ranges"]]
    return [
        (
            name,
            f"{one['samples']:,}",
            f"{one['shift']:+.4g}",
            f"{2 * one['error']:.2g}",
            f"{100 * one['shift'] / output['deviation']:+.2f} %",
            "beyond noise" if _beyond(one, output) else "",
        )
        for name, one in rows
    ]


def _outputs(subject: Subject) -> tuple[Array, Array, Array]:
    """Returns the outputs of both files and the targets, each [N, K]."""
    import numpy as np

    from qatkit.verify.accuracy import all_cores, file_predictor, in_parts
    from qatkit_verify.session import open_session

    runs = [
        in_parts(
            file_predictor(
                open_session(subject.files[name], threads=all_cores(), options=subject.options), subject.task
            )
        )
        for name in ("float", "int8")
    ]
    kept: list[list[Array]] = [[], [], []]
    for inputs, targets in subject.some(_LOOKED_AT):
        for one, values in zip(kept, (*(run(inputs) for run in runs), np.asarray(targets)), strict=True):
            one.append(columns(values))
    exact, found, wanted = (np.concatenate(one) for one in kept)
    return exact, found, wanted


def _shift(difference: Array) -> dict[str, Any]:
    count = len(difference)
    return {
        "samples": count,
        "shift": float(difference.mean()),
        "error": float(difference.std()) / math.sqrt(count),
    }


def _ranges(by: Array, difference: Array) -> list[dict[str, Any]]:
    """Returns the shift within each quintile of `by`; equal values stay together, so there may be fewer."""
    import numpy as np

    edges = np.unique(np.quantile(by, np.linspace(0, 1, _RANGES + 1)))
    places = np.clip(np.searchsorted(edges, by, side="right") - 1, 0, max(0, len(edges) - 2))
    return [
        {
            "low": float(by[places == place].min()),
            "high": float(by[places == place].max()),
            **_shift(difference[places == place]),
        }
        for place in np.unique(places)
    ]


def _beyond(part: Mapping[str, Any], output: Mapping[str, Any]) -> bool:
    """Returns whether a shift is beyond noise; shifts below the outputs' float32 resolution do not count."""
    least = max(_SURE * part["error"], 1e-6 * output["deviation"])
    return bool(part["samples"] >= _FEWEST and abs(part["shift"]) > least)


def _texts(output: Mapping[str, Any], by: str, label: str) -> list[str]:
    """Returns a line for each shift beyond noise."""
    told = []
    whose = f" of {output['name']}" if output["name"] else ""
    for part, (name, _, shift, error, share, beyond) in zip(
        (output, *output["ranges"]), rows_of(output, by), strict=True
    ):
        if beyond:
            where = "" if part is output else f" for {name}"
            told.append(
                f"mean shift{whose} in {label} against float{where}: {shift} +/- {error}"
                f" ({share} of the targets' standard deviation)"
            )
    return told


def _loose(found: Mapping[str, Any], results: Results) -> list[str]:
    """Returns a line if `verify.max_drop` is large compared with the standard deviation of the targets; else []."""
    bound = RequestedSettings(results).get("verify.max_drop")
    deviation = sum(one["deviation"] for one in found["outputs"]) / len(found["outputs"])
    if bound is None or not results.labelled or bound < _LOOSE * deviation:
        return []
    share = f"{100 * bound / deviation:.3g} % of their standard deviation ({deviation:.3g})"
    return [
        f"verify.max_drop={bound:g} is in the unit of the targets and equals {share}; set a smaller bound"
    ]


def _drop(results: Results) -> float | None:
    exact, found = results.accuracy.get("float"), results.accuracy.get("int8")
    return None if exact is None or found is None else results.task.main.lost(exact.score, found.score)
