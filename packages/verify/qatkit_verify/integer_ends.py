"""Converts the inputs and outputs of a file with uint8 images as inputs and quantized outputs.

Data and verification keep using normalised float images and float outputs; this module converts them to the
file's integers and back, as the file's metadata says. A pixel value that preprocessing left between two
integers (in an enlarged image) is rounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

METADATA_KEY = "qatkit.io"
WEIGHT = 127  # the weight of every channel in the convolution that normalises


def bias_steps(mean: Sequence[float]) -> NDArray[np.float64]:
    """Returns the int32 bias -mean/std of the convolution that normalises, in steps of 1/(127·255·std)."""
    return np.asarray(np.rint(-np.asarray(mean, np.float64) * (WEIGHT * 255)))


@dataclass(frozen=True)
class IntegerIO:
    """The meaning of the integer inputs and outputs of a file.

    Attributes:
        mean, std: the normalisation, per channel, that the file applies to pixels in 0..1.
        dtype: the type of the outputs, "uint8" or "int8".
        scale, zero_point: the quantization of the outputs: an output value is (q - zero_point) * scale.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: str
    scale: float
    zero_point: int

    def to_metadata(self) -> dict[str, str]:
        """Returns the entry for the metadata of an ONNX file."""
        return {METADATA_KEY: json.dumps(asdict(self))}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> IntegerIO | None:
        """Reads the output of `to_metadata`; returns None for a file with float inputs and outputs."""
        if METADATA_KEY not in metadata:
            return None
        values = json.loads(metadata[METADATA_KEY])
        return cls(**values | {"mean": tuple(values["mean"]), "std": tuple(values["std"])})

    def pixels(self, images: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Returns the uint8 pixels of normalised images [N, C, H, W], rounded and clipped to 0..255."""
        mean, std = (np.asarray(v, np.float32).reshape(-1, 1, 1) for v in (self.mean, self.std))
        found: NDArray[np.uint8] = np.clip(np.rint((images * std + mean) * 255), 0, 255).astype(np.uint8)
        return found

    def normalised(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Normalises pixels as the file does: to multiples of 1/(127·255·std)."""
        steps = WEIGHT * pixels.astype(np.float64) + bias_steps(self.mean).reshape(-1, 1, 1)
        scale = np.asarray(self.std).reshape(-1, 1, 1) * (WEIGHT * 255)
        return np.asarray(steps / scale, np.float32)

    def floats(self, quantized: NDArray[Any]) -> NDArray[np.float32]:
        """Returns the file's output, dequantized to float32."""
        return ((quantized.astype(np.float32) - self.zero_point) * np.float32(self.scale)).astype(np.float32)

    def rounded(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rounds float outputs to the steps of the file's output."""
        info = np.iinfo(self.dtype)
        q = np.rint(outputs / np.float32(self.scale)) + self.zero_point
        return self.floats(np.clip(q, info.min, info.max))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for model.json."""
        output = {"dtype": self.dtype, "scale": self.scale, "zero_point": self.zero_point}
        return {"input": {"dtype": "uint8", "range": [0, 255]}, "output": output}
