"""Defines a model of the list: its builder and its inputs.

Inputs are described once and made for any batch: a `Feed` is one tensor of n samples; a model is called with
one feed, with a tuple of them (positional arguments) or with a mapping (keyword arguments).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Feed = Callable[[int, torch.Generator], Tensor]
Feeds = Feed | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One model.

    Args:
        name: "group/name".
        build: makes it, with random weights.
        feeds: its inputs.
        twin: the same function of the same weights with functional parts written as modules, made from the model.
        refused: why no int8 file of it can be right; the run must then end with a one-line error.
        opset: the lowest opset that can express it.
        about: a description.
    """

    name: str
    build: Callable[[], nn.Module]
    feeds: Feeds
    twin: Callable[[Any], nn.Module] | None = None
    refused: str = ""
    opset: int = 13
    about: str = ""

    def batch(self, count: int, seed: int) -> Any:
        """Inputs of `count` samples: a tensor, a tuple or a dict, as the model is called with."""
        generator = torch.Generator().manual_seed(seed)
        return _fill(self.feeds, count, generator)


def _fill(feeds: Any, count: int, generator: torch.Generator) -> Any:
    if isinstance(feeds, Mapping):
        return {key: _fill(feed, count, generator) for key, feed in feeds.items()}
    if isinstance(feeds, (tuple, list)):
        return type(feeds)(_fill(feed, count, generator) for feed in feeds)
    return feeds(count, generator)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs for what `Entry.batch` made."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def image(*shape: int) -> Feed:
    """Noise of several scales, [n, *shape], so that different samples give different outputs."""

    def make(count: int, generator: torch.Generator) -> Tensor:
        channels, *sizes = shape
        fine = torch.randn(count, *shape, generator=generator)
        level = torch.randn(count, channels, *(1 for _ in sizes), generator=generator)
        coarse = torch.randn(count, channels, *(min(4, size) for size in sizes), generator=generator)
        return F.interpolate(coarse, sizes) + level + 0.5 * fine

    return make


def vector(*shape: int) -> Feed:
    """Plain noise, [n, *shape]."""
    return lambda count, generator: torch.randn(count, *shape, generator=generator)


def tokens(vocabulary: int, *shape: int) -> Feed:
    """Whole numbers below `vocabulary`, int64 [n, *shape]."""
    return lambda count, generator: torch.randint(0, vocabulary, (count, *shape), generator=generator)


def mask(length: int, dtype: torch.dtype = torch.int64) -> Feed:
    """Which of `length` places are filled, [n, length]: the first ones, at least one."""

    def make(count: int, generator: torch.Generator) -> Tensor:
        filled = torch.randint(length // 2, length + 1, (count, 1), generator=generator)
        return (torch.arange(length) < filled).to(dtype)

    return make


def fixed(value: Tensor) -> Feed:
    """The same tensor for any number of samples: an input without a batch axis."""
    return lambda count, generator: value.clone()


class List:
    """Collects the models of a file: a decorator for classes and functions that build one."""

    def __init__(self, group: str) -> None:
        self.group, self.entries = group, list[Entry]()

    def __call__(self, feeds: Feeds, **more: Any) -> Callable[[Any], Any]:
        """`@odd(image(3, 32, 32))` over a builder makes it an entry under its name."""

        def add(build: Any) -> Any:
            about = (build.__doc__ or "").partition("\n")[0]
            self.entries.append(
                Entry(f"{self.group}/{_plain(build.__name__)}", build, feeds, about=about, **more)
            )
            return build

        return add

    def twin(self, of: Callable[[], nn.Module]) -> Callable[[Any], Any]:
        """`@odd.twin(Builder)` over a function makes it the twin of that entry."""

        def add(make: Any) -> Any:
            index = next(i for i, entry in enumerate(self.entries) if entry.build is of)
            self.entries[index] = replace(self.entries[index], twin=make)
            return make

        return add


def _plain(name: str) -> str:
    """CamelCase as snake_case."""
    parts = [
        "_" + c.lower() if c.isupper() and i and not name[i - 1].isupper() else c.lower()
        for i, c in enumerate(name)
    ]
    return "".join(parts).strip("_")
