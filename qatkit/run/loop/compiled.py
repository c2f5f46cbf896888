"""Training through torch.compile (`trainer.compile`), with counts for the report.

Phases of the schedule (observing, frozen statistics, validation) are attributes that the compiler guards. So
each phase compiles one more graph; a step never runs the graph of an old phase. A call that can't be compiled
breaks the graph in two, which works and is slower; such breaks are counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from qatkit_verify.errors import counted


@dataclass
class Compiled:
    """Counts of what torch.compile did.

    Attributes:
        graphs: compiled graphs: one, and one more for each phase.
        breaks: calls that could not be compiled.
    """

    graphs: int = 0
    breaks: int = 0

    @property
    def note(self) -> str:
        """A line for the report."""
        graphs, breaks = counted(self.graphs, "graph"), counted(self.breaks, "graph break")
        return f"torch.compile: {graphs} (one per phase of the schedule), {breaks}"


@contextmanager
def compiled(graph: nn.Module, wanted: bool) -> Iterator[Compiled]:
    """Compiles calls of `graph` within the context, if wanted; parameters and state stay unchanged."""
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
            warnings.warn(f"{found.note}: {', '.join(counters['graph_break'])[:300]}", stacklevel=2)
