"""Sensitivity: the cost of each weight and each activation, by quantizing only it, and by leaving only it float.

    only       float ─ float ─ [quantized] ─ float ─ outputs         against the float outputs
    all but    quantized ─ quantized ─ [float] ─ quantized ─ outputs

Everything before a site is the same for all later sites. So a batch walks through the graph once in float and
once quantized, and at each site a branch runs the rest of the graph (`qatkit.analysis.walk`). For a graph
with evenly spread sites that is half a run per site. Nothing is exported, and no weight is quantized twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from qatkit.analysis.outputs import Exact, Sums
from qatkit.analysis.partial_sums import Kept
from qatkit.analysis.switches import Switch, switches, turn_all
from qatkit.analysis.walk import PreparedInterpreter
from qatkit.graph.phase import inference, set_phase
from qatkit.graph.signature import Example
from qatkit.progress import Batches, shown
from qatkit.records.analysis import ALL_BUT, ONLY, Outcome, SensitivityRow
from qatkit_verify.classification import NAMES
from qatkit_verify.errors import ConfigError

DIRECTIONS = (ONLY, ALL_BUT)


def sensitivity(
    graph_module: fx.GraphModule,
    batches: Batches,
    *,
    labelled: bool = True,
    at: Sequence[Switch] | None = None,
    directions: Sequence[str] = DIRECTIONS,
    kept: Kept | None = None,
    progress: bool = False,
) -> list[SensitivityRow]:
    """Measures every site, in both directions.

    Args:
        graph_module: prepared, its ranges set.
        batches: (inputs, labels), read once; memory depends on the size of one batch.
        labelled: whether the labels are meaningful; without, agreement with float, the loss and SQNR remain.
        at: the sites to measure (`switches`); by default all of them.
        directions: "only", "all but", or both.
        kept: the file to continue from, and to write after each batch.
        progress: whether a bar is shown.

    Returns:
        A row per site and direction, in graph order; `ranked` sorts them.

    Raises:
        ConfigError: another direction, or no images.
    """
    for direction in directions:
        if direction not in DIRECTIONS:
            raise ConfigError("directions", direction, f"one of {', '.join(DIRECTIONS)}")
    sites = switches(graph_module) if at is None else list(at)
    done, sums = (0, {}) if kept is None else kept.read()
    measured = _Measured(graph_module, sites, directions, sums)
    with inference(graph_module):
        for number, (inputs, labels) in enumerate(shown(batches, "sensitivity", progress), 1):
            if number <= done:
                continue
            measured.add(inputs, labels if labelled else None)
            if kept is not None:
                kept.write(number, measured.sums)
    if not measured.sums:
        raise ConfigError("analysis.images", 0, "at least one image to measure sensitivity")
    return [
        _row(switch, direction, measured.sums[f"{direction} {switch.key}"].outcome())
        for direction in directions
        for switch in sites
    ]


class _Measured:
    """The sums of every row, by its name."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        sites: Sequence[Switch],
        directions: Sequence[str],
        sums: dict[str, Sums],
    ) -> None:
        self.sums, self._sites, self._directions = sums, sites, directions
        self._graph, self._walker, self._every = (
            graph_module,
            PreparedInterpreter(graph_module),
            switches(graph_module),
        )

    def add(self, inputs: Example, labels: Any) -> None:
        """Adds one batch."""
        set_phase(self._graph, observe=False, quantize=False)
        exact = Exact(self._walker.outputs(inputs), labels)
        for direction in self._directions:
            turn_all(self._every, direction == ALL_BUT)

            def see(switch: Switch, outputs: Sequence[Tensor], of: str = direction) -> None:
                exact.add(self.sums.setdefault(f"{of} {switch.key}", Sums()), outputs)

            self._walker.walk(inputs, self._sites, see, branch_on=direction == ONLY)


def _row(switch: Switch, direction: str, found: Outcome) -> SensitivityRow:
    return SensitivityRow(
        switch.site,
        switch.kind,
        direction,
        found.score,
        found.loss,
        found.sqnr,
        found.agreement,
        found.cross_entropy,
    )


_WORST: dict[
    str, Callable[[SensitivityRow], float]
] = {  # of a site quantized on its own: the larger, the more sensitive
    NAMES.main.key: lambda row: 0.0 if row.score is None else -row.score,
    "agreement": lambda row: 0.0 if row.agreement is None else -row.agreement,
    "loss": lambda row: row.loss,
    "sqnr": lambda row: float("-inf") if row.sqnr is None else -row.sqnr,
}


def ranked(rows: Iterable[SensitivityRow], by: str = "loss", direction: str = ONLY) -> list[SensitivityRow]:
    """Returns the rows of a direction, the most sensitive first; of equals the one with the larger loss.

    A sensitive site loses much if only it is quantized; if only it is float, little loss remains.

    Args:
        rows: the rows of `sensitivity` or `estimate`.
        by: "loss", "sqnr", "agreement" or the key of the metric.
        direction: "only" or "all but".

    Raises:
        ConfigError: another figure.
    """
    if by not in _WORST:
        raise ConfigError("by", by, f"one of {', '.join(_WORST)}")
    sign = 1 if direction == ONLY else -1
    chosen = [row for row in rows if row.direction == direction]
    return sorted(chosen, key=lambda row: (sign * _WORST[by](row), sign * row.loss), reverse=True)
