"""The request that a run passes to a data source whose function has a parameter `request`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qatkit.config.schema.model import AUDIO, DRAWN, LABELLED, MAPS, PAIRS, RECORDINGS, TEXT
from qatkit_verify.errors import ConfigError

if TYPE_CHECKING:
    from qatkit.config.schema import DataConfig
    from qatkit.data.arrays import Port

# Settings that only some of our sources read; a user's source may read any of them.
_OWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("axes", "scale"), (AUDIO,)),
    **dict.fromkeys(("rate", "frame", "hop"), (AUDIO, *RECORDINGS)),
    **dict.fromkeys(("seconds", "features", "features_in", "mels", "coefficients", "log_offset"), RECORDINGS),
    **dict.fromkeys(("count", "sizes", "ranges"), (DRAWN,)),
    **dict.fromkeys(("context", "tokenizer"), (TEXT, PAIRS, LABELLED)),
    "columns": (LABELLED,),
    "ignored": (MAPS,),
}


@dataclass(frozen=True)
class Request:
    """The settings of the data, and the inputs that samples must provide.

    Attributes:
        settings: the data group.
        inputs: inputs of the model, without its states; empty if they are unknown.
        states: the output that feeds each state input in the next step, by input name. If there are any,
            items are steps, and both splits need an attribute `lengths` with the number of items of each
            sequence, in order.
        about: facts from the model's file in addition to its graph: its metadata, and the inputs fixed to one
            number.
    """

    settings: DataConfig
    inputs: Sequence[Port] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)


def is_asked(source: Callable[..., Any]) -> bool:
    """Returns whether a source has a parameter `request`."""
    try:
        return "request" in inspect.signature(source).parameters
    except (TypeError, ValueError):  # a builtin may have no signature
        return False


def check_own_settings(config: DataConfig, source: Callable[..., Any]) -> None:
    """Raises ConfigError for a setting that this source does not read."""
    users = is_asked(source) and not config.source.startswith("qatkit.")
    for key, owners in _OWN.items():
        value = getattr(config, key)
        if value is not None and config.source not in owners and not users:
            names = ", ".join(f"data={one.rpartition('.')[2]}" for one in owners)
            verb = "reads" if len(owners) == 1 else "read"
            allowed = f"null with data.source={config.source}; only {names} {verb} this key"
            raise ConfigError(f"data.{key}", value, allowed)
