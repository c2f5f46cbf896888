"""The result of a pass over a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from qatkit.records.tried import Ran


@dataclass
class PassResult:
    """The result of a pass over a graph.

    Attributes:
        graph: the graph, changed in place.
        changed: the number of changed sites.
        skipped: (site, reason) of every operator that the pass might have changed but left unchanged; from
            `convert`, (site, note) on scales.
        ran: from `QATModule.run_algorithms`, the algorithms in the order of their calls.
    """

    graph: fx.GraphModule
    changed: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
