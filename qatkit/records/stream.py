"""A file that takes its input in chunks: what it says of itself, and where it lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

METADATA_KEY = "qatkit.stream"  # of the file
KEY = "export.stream"


@dataclass(frozen=True)
class Stream:
    """How the chunks of a file follow each other.

    Attributes:
        axis: of the input, along which it is cut.
        states: by input, the output that is this input of the next chunk; zeros before the first one.
    """

    axis: int
    states: Mapping[str, str]

    def to_text(self) -> str:
        """Returns JSON, as the file's metadata hold it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Stream:
        """Returns what `to_text` wrote."""
        return cls(**json.loads(text))


def stream_file(path: Path) -> Path:
    """Returns the path of the file that takes chunks beside the whole one: model.int8.stream.onnx."""
    return path.with_suffix(f".stream{path.suffix}")
