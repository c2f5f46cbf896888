"""Describes the inputs and outputs of a file, as stored in model.json of a bundle of arrays.

    {"format": 1, "inputs": [{"name", "type", "shape", "batch_axis"}, ...], "outputs": [the same, ...]}

Types are named as in NumPy. In a shape, null is a dynamic axis; "batch_axis" is null if there is none or it
is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from qatkit_verify.errors import ConfigError
from qatkit_verify.feeds import Array, numpy_type


@dataclass(frozen=True)
class Port:
    """An input or an output of a file.

    Attributes:
        name: the name in the file.
        type: NumPy's name of its element type.
        shape: the size of each axis; None for a dynamic axis.
        batch_axis: the batch axis; None if there is none or it is unknown.
    """

    name: str
    type: str
    shape: tuple[int | None, ...]
    batch_axis: int | None = None

    @classmethod
    def of(cls, declared: Any, batch_axis: int | None = None) -> Port:
        """Returns a port from a session's declaration (ONNX Runtime's NodeArg)."""
        shape = tuple(size if isinstance(size, int) else None for size in declared.shape or ())
        return cls(declared.name, np.dtype(numpy_type(declared.type)).name, shape, batch_axis)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Port:
        """Reads a port from the output of `as_dict`.

        Raises:
            ConfigError: the record is not such an output.
        """
        try:
            shape = tuple(None if size is None else int(size) for size in stored["shape"])
            axis = stored["batch_axis"]
            return cls(
                str(stored["name"]),
                np.dtype(str(stored["type"])).name,
                shape,
                None if axis is None else int(axis),
            )
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(
                "model.json", json.dumps(stored), f"an entry with name, type, shape and batch_axis ({reason})"
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """Returns the port as plain containers for JSON."""
        return {**asdict(self), "shape": list(self.shape)}

    def __str__(self) -> str:
        sizes = enumerate(self.shape)
        axes = (
            "N" if axis == self.batch_axis else "?" if size is None else str(size) for axis, size in sizes
        )
        return f"{self.name} {self.type} [{', '.join(axes)}]"

    def declares(self, own: Port) -> bool:
        """Returns whether `own`, a port that a file declares, has the same name, type and shape."""
        return (self.name, self.type, self.shape) == (own.name, own.type, own.shape)

    def takes(self, given: Array) -> bool:
        """Returns whether an array has this type and shape; a dynamic axis may have any size."""
        fits = len(given.shape) == len(self.shape) and all(
            size in (None, has) for size, has in zip(self.shape, given.shape, strict=True)
        )
        return fits and given.dtype.name == self.type
