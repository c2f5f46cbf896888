"""The request that a run passes to a data source whose function has a parameter `request`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qatkit.config.schema import DataConfig
    from qatkit.data.arrays import Port


@dataclass(frozen=True)
class Request:
    """The settings of the data, and the inputs that samples have to give.

    Attributes:
        settings: the data group.
        inputs: of the model, without its states; empty where they are not known.
        states: inputs of the model that are outputs of the step before, with these outputs. Items are steps then, and
            both splits have an attribute `lengths`, the number of items of each sequence, in order.
    """

    settings: DataConfig
    inputs: Sequence[Port] = ()
    states: Mapping[str, str] = field(default_factory=dict)


def is_asked(source: Callable[..., Any]) -> bool:
    """Returns whether a source takes a request."""
    try:
        return "request" in inspect.signature(source).parameters
    except (TypeError, ValueError):  # of a builtin
        return False
