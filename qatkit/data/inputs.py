"""The inputs of a run's model: images of one shape, or samples of named arrays.

images   a tensor [N, C, H, W], drawn at random if only shapes and times matter
arrays   one tensor, or tensors by the names of the model's inputs: the first samples of the data, since random
         numbers make no sense as ids, lengths or energies; only `noise` draws floating-point values
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = Tensor | dict[str, Tensor]


class Inputs(ABC):
    """The inputs of a model, for any batch size.

    Attributes:
        shape: the shape of one sample of the first input, without the batch axis.
        said_by: a clause that names the settings of the inputs; it follows "as" in messages.
    """

    shape: tuple[int, ...]
    said_by: ClassVar[str]

    @abstractmethod
    def example(self, count: int) -> Batch:
        """Returns a batch of `count` samples, the same at each call."""

    @abstractmethod
    def noise(self, count: int, generator: torch.Generator) -> Batch:
        """Returns a batch with standard normal values; inputs that are not float keep the data's values."""

    @abstractmethod
    def timed(self, count: int) -> Sequence[int] | Mapping[str, NDArray[Any]]:
        """Returns the inputs for timing a file: the shape of a batch of noise, or arrays by name."""

    def timed_by(self, batch: int) -> Sequence[int] | Mapping[str, NDArray[Any]]:
        """Returns `timed` for `qatkit_verify.latency`: a shape without the batch axis, or arrays by name."""
        given = self.timed(batch)
        return given if isinstance(given, Mapping) else given[1:]

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The size of one sample in bytes."""

    @property
    @abstractmethod
    def text(self) -> str:
        """A description of the shape of a batch."""

    @abstractmethod
    def stored(self) -> dict[str, Any]:
        """Returns the entries of a checkpoint from which `inputs_of` restores the inputs."""


@dataclass(frozen=True)
class ImageInputs(Inputs):
    """Images of `shape`: (C, H, W), or (H, W, C) with data.layout=nhwc."""

    said_by = "data.image_size and data.mean define them"
    shape: tuple[int, ...]

    def example(self, count: int) -> Tensor:
        return self.noise(count, torch.Generator().manual_seed(0))

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, *self.shape, generator=generator)

    def timed(self, count: int) -> tuple[int, ...]:
        return count, *self.shape

    @property
    def bytes(self) -> int:
        return 4 * math.prod(self.shape)

    @property
    def text(self) -> str:
        return f"images [N, {', '.join(map(str, self.shape))}]"

    def stored(self) -> dict[str, Any]:
        return {"input_shape": list(self.shape)}


@dataclass(frozen=True)
class ArrayInputs(Inputs):
    """Inputs that are arrays, with the names of the model's inputs.

    Attributes:
        samples: the first samples of the data as one batch, by input.
        axes: the batch axis of each input; None if all samples share one value.
        lengths: maximum lengths of an example, by input and axis. If the model accepts any length, short
            examples save time and memory.
        lone: whether the model is called with one tensor rather than with tensors by name.
    """

    said_by = "data.source gives them"
    samples: dict[str, Tensor]
    axes: dict[str, int | None]
    lengths: dict[str, dict[int, int]] = field(default_factory=dict)

    @property
    def lone(self) -> bool:
        return len(self.samples) == 1

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        name, first = next(iter(self.samples.items()))
        return tuple(size for axis, size in enumerate(first.shape) if axis != self.axes[name])

    def example(self, count: int) -> Batch:
        found = {name: self._repeated(name, count) for name in self.samples}
        for name, axes in self.lengths.items():
            for axis, length in axes.items():
                found[name] = found[name].narrow(axis, 0, min(length, found[name].shape[axis]))
        return self._batch(found)

    def noise(self, count: int, generator: torch.Generator) -> Batch:
        found = {name: self._repeated(name, count) for name in self.samples}
        drawn = {
            name: torch.randn(one.shape, generator=generator) if one.is_floating_point() else one
            for name, one in found.items()
        }
        return self._batch(drawn)

    def timed(self, count: int) -> dict[str, NDArray[Any]]:
        return {name: self._repeated(name, count).numpy() for name in self.samples}

    @property
    def bytes(self) -> int:
        return sum(self._repeated(name, 1).nbytes for name in self.samples)

    @property
    def text(self) -> str:
        def axes(name: str) -> str:
            sizes = enumerate(self.samples[name].shape)
            return ", ".join("N" if axis == self.axes[name] else str(size) for axis, size in sizes)

        return "arrays " + ", ".join(f"{name} [{axes(name)}]" for name in self.samples)

    def stored(self) -> dict[str, Any]:
        about = {"samples": dict(self.samples), "axes": dict(self.axes)}
        return {"inputs": about | ({"lengths": self.lengths} if self.lengths else {})}

    def _batch(self, found: dict[str, Tensor]) -> Batch:
        return next(iter(found.values())) if self.lone else found

    def _repeated(self, name: str, count: int) -> Tensor:
        """Returns `count` samples of an input; if there are fewer, they are repeated in order."""
        axis, one = self.axes[name], self.samples[name]
        if axis is None:
            return one
        return one.index_select(axis, torch.arange(count) % one.shape[axis])


def inputs_of(about: Mapping[str, Any]) -> Inputs:
    """Returns the inputs of a run from the entries of its checkpoint (`Inputs.stored`)."""
    if "inputs" in about:
        stored = about["inputs"]
        return ArrayInputs(stored["samples"], stored["axes"], stored.get("lengths", {}))
    return ImageInputs(tuple(about["input_shape"]))
