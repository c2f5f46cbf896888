"""Training through torch.compile (`trainer.compile`), with counts for the report.

The phases of the schedule (observing, frozen statistics, validation) are stored in attributes that the
compiler guards. Each phase therefore compiles another graph, and a step never runs the graph of an old phase.
A call that cannot be compiled breaks the graph in two, which is slower; such breaks are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from qatkit.warning import warn
from qatkit_verify.errors import counted


@dataclass
class Compiled:
    """Counts of what torch.compile did.

    Attributes:
        graphs: the number of compiled graphs: one, and one more for each further phase.
        breaks: the number of calls that could not be compiled.
    """

    graphs: int = 0
    breaks: int = 0

    @property
    def note(self) -> str:
        """The note for the report."""
        graphs, breaks = counted(self.graphs, "graph"), counted(self.breaks, "graph break")
        return f"torch.compile: {graphs} (one per phase of the schedule), {breaks}"


@contextmanager
def compiled(graph: nn.Module, wanted: bool) -> Iterator[Compiled]:
    """Compiles calls of `graph` within the context, if wanted; does not change its parameters and state."""
    found = Compiled()
    if not wanted:
        yield found
        return
    from torch._dynamo.utils import counters

    counters.clear()
    graph.compile(dynamic=False)
    try:
        yield found
    finally:
        graph._compiled_call_impl = None
        found.graphs = int(counters["stats"]["unique_graphs"])
        found.breaks = sum(counters["graph_break"].values())
        if found.breaks:
            warn(f"{found.note}: {', '.join(counters['graph_break'])[:300]}")
