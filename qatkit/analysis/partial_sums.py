"""Stores the sums of a long measurement in a file after each batch, so that a killed run can continue.

The file contains a key: a fingerprint of the model, its ranges and the images. If a file has another key, the
measurement starts from the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from qatkit.analysis.outputs import Sums
from qatkit.calibration.cache import fingerprint
from qatkit_verify.files import write_text


def key_of(graph_module: fx.GraphModule, *more: Any) -> str:
    """Returns the key for a prepared graph, its weights and ranges, and `more` (images and batch size)."""
    state = sorted(graph_module.state_dict().items())
    parts = [part for name, value in state for part in (name, value)]
    return fingerprint(graph_module.code, *parts, *more)


@dataclass
class Kept:
    """The file of one measurement.

    Attributes:
        path: the path of the file, in a folder that exists.
        key: a fingerprint of everything that the sums depend on.
    """

    path: Path
    key: str

    def read(self) -> tuple[int, dict[str, Sums]]:
        """Returns the number of finished batches, and the sums by name; 0 and {} if no readable file has this key."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["key"] != self.key:
                return 0, {}
            return int(stored["batches"]), {name: Sums(**sums) for name, sums in stored["sums"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return 0, {}

    def write(self, batches: int, sums: Mapping[str, Sums]) -> None:
        """Writes the number of finished batches and the sums atomically."""
        stored = {
            "key": self.key,
            "batches": batches,
            "sums": {name: one.as_dict() for name, one in sums.items()},
        }
        write_text(self.path, json.dumps(stored) + "\n")
