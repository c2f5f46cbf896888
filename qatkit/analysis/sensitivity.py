"""Measures the loss from each weight and activation, when only it is quantized and when only it is float.

    only       float ─ float ─ [quantized] ─ float ─ outputs                 compared with the float outputs
    all but    quantized ─ quantized ─ [float] ─ quantized ─ outputs         compared with the float outputs

The values before a site are the same for all later sites. Therefore each batch runs through the graph once in float
and once quantized, and at each site a branch runs the rest of the graph (`qatkit.analysis.walk`). If the sites are
evenly distributed, each costs half a run of the graph. Nothing is exported, and each weight is quantized only once.
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
    """Measures the loss from every site.

    Args:
        graph_module: a prepared graph whose ranges are set.
        batches: batches of (inputs, labels), read once; memory depends on the size of one batch.
        labelled: whether the labels are meaningful. If not, only agreement with float, loss and SQNR are measured.
        at: the sites to measure (`switches`); all by default.
        directions: "only", "all but", or both.
        kept: the file from which to continue, which is written after each batch.
        progress: whether to show a progress bar.

    Returns:
        A row for each direction and site. The sites of a direction are in graph order; `ranked` sorts them.

    Raises:
        ConfigError: a direction is unknown, or there are no images.
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
        raise ConfigError("analysis.images", 0, "at least one sample to measure sensitivity")
    return [
        _row(switch, direction, measured.sums[f"{direction} {switch.key}"].outcome())
        for direction in directions
        for switch in sites
    ]


class _Measured:
    """Measures batch by batch; `sums` has the sums of each result under "DIRECTION KIND SITE"."""

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
] = {  # sort keys for sites quantized on their own; a larger key means more sensitive
    NAMES.main.key: lambda row: 0.0 if row.score is None else -row.score,
    "agreement": lambda row: 0.0 if row.agreement is None else -row.agreement,
    "loss": lambda row: row.loss,
    "sqnr": lambda row: float("-inf") if row.sqnr is None else -row.sqnr,
}


def ranked(rows: Iterable[SensitivityRow], by: str = "loss", direction: str = ONLY) -> list[SensitivityRow]:
    """Returns the rows of a direction, sorted by sensitivity, most sensitive first; the loss decides ties.

    With "only", a larger loss means a more sensitive site; with "all but", a smaller loss does.

    Args:
        rows: rows from `sensitivity` or `estimate`.
        by: the metric to sort by: "loss", "sqnr", "agreement" or "top1".
        direction: "only" or "all but".

    Raises:
        ConfigError: the metric is unknown.
    """
    if by not in _WORST:
        raise ConfigError("by", by, f"one of {', '.join(_WORST)}")
    sign = 1 if direction == ONLY else -1
    chosen = [row for row in rows if row.direction == direction]
    return sorted(chosen, key=lambda row: (sign * _WORST[by](row), sign * row.loss), reverse=True)
