"""What every pass returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


@dataclass
class PassResult:
    """A pass: graph in, this out.

    Attributes:
        graph: the graph, changed in place.
        changed: how many sites were changed.
        skipped: (site, reason) of everything that the pass left as it was although it might have been meant.
    """

    graph: fx.GraphModule
    changed: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)
