"""The entries of the list of models: a builder and a description of the inputs.

Inputs are described once and made for any batch size: a `Feed` makes one tensor of n samples. A model is called with
one feed, with a tuple of feeds (positional arguments) or with a mapping (keyword arguments).
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
    """One model of the list.

    Args:
        name: "group/name".
        build: returns the model, with random weights.
        feeds: its inputs.
        twin: returns a model that computes the same function as the given one with the same weights, but calls modules
            in place of functions; None if the entry has no such model.
        refused: why no INT8 file of the model can be correct, or "". With a reason, the run must end with a one-line
            error.
        opset: the lowest opset that can express the model.
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
        """Returns inputs of `count` samples in the form of the call: a tensor, a tuple or a dict."""
        generator = torch.Generator().manual_seed(seed)
        return _fill(self.feeds, count, generator)


def _fill(feeds: Any, count: int, generator: torch.Generator) -> Any:
    if isinstance(feeds, Mapping):
        return {key: _fill(feed, count, generator) for key, feed in feeds.items()}
    if isinstance(feeds, (tuple, list)):
        return type(feeds)(_fill(feed, count, generator) for feed in feeds)
    return feeds(count, generator)


def call(model: nn.Module, inputs: Any) -> Any:
    """Returns the model's outputs for inputs made by `Entry.batch`."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def image(*shape: int) -> Feed:
    """Returns a feed of noise at several spatial scales, [n, *shape]: different samples give different outputs."""

    def make(count: int, generator: torch.Generator) -> Tensor:
        channels, *sizes = shape
        fine = torch.randn(count, *shape, generator=generator)
        level = torch.randn(count, channels, *(1 for _ in sizes), generator=generator)
        coarse = torch.randn(count, channels, *(min(4, size) for size in sizes), generator=generator)
        return F.interpolate(coarse, sizes) + level + 0.5 * fine

    return make


def vector(*shape: int) -> Feed:
    """Returns a feed of standard normal noise, [n, *shape]."""
    return lambda count, generator: torch.randn(count, *shape, generator=generator)


def tokens(vocabulary: int, *shape: int) -> Feed:
    """Returns a feed of integers below `vocabulary`, int64 [n, *shape]."""
    return lambda count, generator: torch.randint(0, vocabulary, (count, *shape), generator=generator)


def mask(length: int, dtype: torch.dtype = torch.int64) -> Feed:
    """Returns a feed of padding masks, [n, length]: 1s for at least the first half, then 0s."""

    def make(count: int, generator: torch.Generator) -> Tensor:
        filled = torch.randint(length // 2, length + 1, (count, 1), generator=generator)
        return (torch.arange(length) < filled).to(dtype)

    return make


def fixed(value: Tensor) -> Feed:
    """Returns a feed of an input without a batch axis: the same tensor for any number of samples."""
    return lambda count, generator: value.clone()


class List:
    """The entries of a module; a call returns a decorator that adds a class or function building a model."""

    def __init__(self, group: str) -> None:
        self.group, self.entries = group, list[Entry]()

    def __call__(self, feeds: Feeds, **more: Any) -> Callable[[Any], Any]:
        """Returns a decorator that adds a builder under its name, as in `@odd(image(3, 32, 32))`."""

        def add(build: Any) -> Any:
            about = (build.__doc__ or "").partition("\n")[0]
            self.entries.append(
                Entry(f"{self.group}/{_plain(build.__name__)}", build, feeds, about=about, **more)
            )
            return build

        return add

    def twin(self, of: Callable[[], nn.Module]) -> Callable[[Any], Any]:
        """Returns a decorator that makes a function the twin of an entry, as in `@odd.twin(Builder)`."""

        def add(make: Any) -> Any:
            index = next(i for i, entry in enumerate(self.entries) if entry.build is of)
            self.entries[index] = replace(self.entries[index], twin=make)
            return make

        return add


def _plain(name: str) -> str:
    """Returns a CamelCase name as snake_case."""
    parts = [
        "_" + c.lower() if c.isupper() and i and not name[i - 1].isupper() else c.lower()
        for i, c in enumerate(name)
    ]
    return "".join(parts).strip("_")
