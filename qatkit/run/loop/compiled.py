"""trainer.compile: the graph that trains through torch.compile, and what there is to say of it.

Phases of the schedule (observing, frozen statistics, validation) are attributes that the compiler guards, so each of
them is one more graph that is compiled; a step of an old phase never is. A call that can't be compiled breaks the graph
in two, which works and is slower: it is counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass
class Compiled:
    """What torch.compile did.

    Attributes:
        graphs: that were compiled: one, and one more for each phase.
        breaks: calls that could not be compiled.
    """

    graphs: int = 0
    breaks: int = 0

    @property
    def note(self) -> str:
        """For the report."""
        return f"torch.compile: {self.graphs} graphs (phases of the schedule), {self.breaks} graph breaks"


@contextmanager
def compiled(graph: nn.Module, wanted: bool) -> Iterator[Compiled]:
    """Within, calls of `graph` are compiled, where that is wanted; parameters and state stay what they are."""
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
