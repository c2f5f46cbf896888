"""Stores the sums of a long measurement in a file, batch by batch, so that a killed run continues where it was.

The file holds a key: fingerprints of the model, its ranges and the images. A file with another key is started
over.
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
    """Returns the key of a prepared graph with its weights and ranges, and of `more` (the images and the batch
    size).
    """
    state = sorted(graph_module.state_dict().items())
    parts = [part for name, value in state for part in (name, value)]
    return fingerprint(graph_module.code, *parts, *more)


@dataclass
class Kept:
    """The file of one measurement.

    Attributes:
        path: a path in a folder that exists.
        key: identifies everything that the sums depend on.
    """

    path: Path
    key: str

    def read(self) -> tuple[int, dict[str, Sums]]:
        """Returns the number of finished batches, and the sums by name; 0 and {} without a file of this key."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["key"] != self.key:
                return 0, {}
            return int(stored["batches"]), {name: Sums(**sums) for name, sums in stored["sums"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return 0, {}

    def write(self, batches: int, sums: Mapping[str, Sums]) -> None:
        """Writes the file completely or not at all."""
        stored = {
            "key": self.key,
            "batches": batches,
            "sums": {name: one.as_dict() for name, one in sums.items()},
        }
        write_text(self.path, json.dumps(stored) + "\n")
