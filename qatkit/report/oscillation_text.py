"""Oscillating weights as one line for the terminal and the page, and as figures for report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WORST = 3
_MANY = 0.01


def figures(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums over the operators, and the figures per operator: `path`, `weights`, `oscillating`, `frozen`."""
    sums = {name: sum(layer[name] for layer in layers) for name in ("weights", "oscillating", "frozen")}
    return {**sums, "layers": [dict(layer) for layer in layers]}


def line(found: Mapping[str, Any], kind: str) -> str:
    """Returns the line on oscillating weights.

    Args:
        found: the result of `figures`.
        kind: the value of `schedule.oscillation` in the run.
    """
    worst = sorted(found["layers"], key=_share, reverse=True)[:_WORST]
    told = ", ".join(f"{one['path']} {_of(one)}" for one in worst if one["oscillating"] or one["frozen"])
    advice = ""
    if kind == "count" and found["oscillating"] > _MANY * found["weights"]:
        advice = "; schedule.oscillation=freeze or schedule.oscillation=dampen reduces them"
    return f"oscillating weights: {_of(found)}" + (f"; most in {told}" if told else "") + advice


def _share(layer: Mapping[str, Any]) -> float:
    return float((layer["oscillating"] + layer["frozen"]) / max(1, layer["weights"]))


def _of(found: Mapping[str, Any]) -> str:
    share = {name: 100 * found[name] / max(1, found["weights"]) for name in ("oscillating", "frozen")}
    frozen = f" ({share['frozen']:.2f} % frozen)" if found["frozen"] else ""
    return f"{share['oscillating']:.2f} %{frozen}"
