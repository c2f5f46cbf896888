"""Describes a file that processes its input in chunks: its metadata and its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qatkit_verify.errors import ConfigError

if TYPE_CHECKING:
    import onnxruntime as ort

METADATA_KEY = "qatkit.stream"  # the key in the metadata of the file
KEY = "export.stream"
LEAST_DB = 30.0  # minimum SQNR; a step of an 8-bit output, which rounding may cause, is 40 dB or more below its range


@dataclass(frozen=True)
class Stream:
    """A description of how a file processes chunks one after another.

    Attributes:
        axis: the axis along which the input is cut.
        states: the output that feeds each state input in the next chunk, by input name. States are zero
            before the first chunk.
    """

    axis: int
    states: Mapping[str, str]

    def to_text(self) -> str:
        """Returns JSON, as in the file's metadata."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Stream:
        """Reads a stream from the output of `to_text`.

        Raises:
            ValueError, TypeError: the text is not such JSON.
        """
        stored = json.loads(text)
        if not isinstance(stored, dict) or not isinstance(stored.get("states"), dict):
            raise ValueError("axis or states is missing")
        found = cls(**stored)
        if type(found.axis) is not int or not all(isinstance(one, str) for one in found.states.values()):
            raise ValueError("the axis is not a number, or a state is not a name")
        return found


def stream_of(session: ort.InferenceSession) -> Stream:
    """Returns the axis of the chunks and the states of a file that processes its input in chunks.

    Raises:
        ConfigError: the metadata of the file does not say so, or does not match its inputs and outputs.
    """
    from qatkit_verify.session import session_file  # needs ONNX Runtime

    told = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    entry = f"its metadata entry '{METADATA_KEY}'"
    if told is None:
        reason = f"{entry}, which says how chunks follow each other, is missing"
        raise ConfigError("onnx file", session_file(session), reason=reason)
    try:
        found = Stream.from_text(told)
        shapes = {one.name: one.shape for one in session.get_inputs()}
        given = {one.name for one in session.get_outputs()}
        if (
            not found.states
            or not found.states.keys() < shapes.keys()
            or not set(found.states.values()) < given
        ):
            raise ValueError("it names inputs or outputs that the file does not have")
        cut = [shape for name, shape in shapes.items() if name not in found.states]
        if len(cut) != 1 or not 0 < found.axis < len(cut[0]):
            raise ValueError(f"the file does not have one input with an axis {found.axis}")
        if not all(len(shapes[name]) == 2 and isinstance(shapes[name][1], int) for name in found.states):
            raise ValueError("a state has another shape than [N, size]")
    except (ValueError, TypeError) as error:
        reason = f"{entry} is damaged ({error})"
        raise ConfigError("onnx file", session_file(session), reason=reason) from error
    return found


def stream_file(path: Path) -> Path:
    """Returns the path of the file for chunks next to `path`: model.int8.stream.onnx for model.int8.onnx."""
    return path.with_suffix(f".stream{path.suffix}")
