"""Small models with several inputs and outputs, and examples for them.

`tests/test_signatures.py` runs them through all steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from chain import noise
from torch import Tensor, fx, nn

from qatkit.graph.signature import (
    Example,
    arguments_of,
    batch_axes,
    call,
    flatten,
    input_names,
    leaves,
    output_leaves,
    unflatten,
)
from qatkit.graph.trace import trace


class ImageAndVector(nn.Module):
    """An image and a vector of further features as inputs; logits and features as named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.known, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(5, 8), nn.Linear(16, 4)

    def forward(self, image: Tensor, vector: Tensor) -> dict[str, Tensor]:
        seen = torch.relu(self.conv(image)).mean((2, 3))
        features = torch.cat([seen, torch.relu(self.known(vector))], 1)
        return {"logits": self.head(features), "features": features}


class Tokens(nn.Module):
    """One attention layer over token ids with a mask; outputs logits for each token and for the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(20, 16), nn.Linear(16, 48)
        self.out, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(~mask.unsqueeze(1), -1e4)
        x = x + self.out(scores.softmax(-1) @ v)
        return self.head(x), self.head(x.mean(1))


class SequenceFirst(nn.Module):
    """Computes on [T, N, C], time before batch, and adds a bias [T, C] without a batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, steps: Tensor, bias: Tensor) -> Tensor:
        x = torch.relu(self.first(steps.transpose(0, 1))) + bias.unsqueeze(1)
        result: Tensor = self.second(x).transpose(0, 1)
        return result


@dataclass
class Maps:
    """The outputs of `Pyramid`."""

    pooled: Tensor
    maps: dict[str, list[Tensor]]
    classes: Tensor
    nothing: Tensor | None = None


class Pyramid(nn.Module):
    """A model whose output is a dataclass: it contains a mapping with a list, the class as an integer, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, 2), nn.Linear(8, 4)

    def forward(self, pixels: Tensor) -> Maps:
        fine = torch.relu(self.fine(pixels))
        coarse = torch.relu(self.coarse(fine))
        pooled = self.head(coarse.mean((2, 3)))
        return Maps(pooled, {"levels": [fine, coarse]}, pooled.argmax(1))


class Pair(nn.Module):
    """Two images through the same convolution, classified as same or different."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 2)

    def forward(self, pair: dict[str, Tensor]) -> Tensor:
        left, right = (torch.relu(self.body(pair[side])).mean((2, 3)) for side in ("left", "right"))
        result: Tensor = self.head(left - right)
        return result


class Arg(nn.Module):
    """The predicted class, as an integer, as the only output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.body(x)).mean((2, 3))).argmax(1)
        return result


class Classes(nn.Module):
    """Token ids as the only input, logits as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.embed(ids).mean(1))
        return result


class Signature(NamedTuple):
    """A model, a function from size and seed to a batch, and the names of the file's inputs and outputs."""

    model: type[nn.Module]
    batch: Callable[[int, int], Example]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _ids(size: int, seed: int) -> Tensor:
    return torch.randint(0, 20, (size, 7), generator=torch.Generator().manual_seed(seed))


def _mask(size: int) -> Tensor:
    return torch.arange(7).expand(size, 7) <= 3 + torch.arange(size).unsqueeze(1) % 4


def _tokens(size: int, seed: int) -> dict[str, Any]:
    return {"mask": _mask(size), "ids": _ids(size, seed)}


def _image_and_vector(size: int, seed: int) -> tuple[Tensor, Tensor]:
    return noise(size, 3, 12, 12, seed=seed), noise(size, 5, seed=seed + 100)


def _pair(size: int, seed: int) -> tuple[dict[str, Tensor]]:
    sides = {side: noise(size, 3, 12, 12, seed=seed + i) for i, side in enumerate(("left", "right"))}
    return (OrderedDict(sides),)


def _steps(size: int, seed: int) -> tuple[Tensor, Tensor]:
    return noise(size, 9, 6, seed=seed), noise(9, 8, seed=7)


SIGNATURES = {
    "image and vector": Signature(
        ImageAndVector, _image_and_vector, ("image", "vector"), ("logits", "features")
    ),
    "tokens": Signature(Tokens, _tokens, ("mask", "ids"), ("output_0", "output_1")),
    "sequence first": Signature(SequenceFirst, _steps, ("steps", "bias"), ("output",)),
    "nested outputs": Signature(
        Pyramid,
        lambda size, seed: {"pixels": noise(size, 3, 12, 12, seed=seed)},
        ("pixels",),
        ("pooled", "maps_levels_0", "maps_levels_1", "classes"),
    ),
    "nested inputs": Signature(Pair, _pair, ("pair_left", "pair_right"), ("output",)),
    "ids alone": Signature(Classes, _ids, ("input",), ("output",)),
    "an integer": Signature(
        Arg, lambda size, seed: noise(size, 3, 12, 12, seed=seed), ("input",), ("output",)
    ),
}


class _Flat(nn.Module):
    """A wrapper that calls the model with a flat list of the example's tensors and returns a flat tuple."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        super().__init__()
        self.model, self._example = model, example

    def run(self, *tensors: Tensor) -> Any:
        args, kwargs = cast(Any, unflatten(arguments_of(self._example), tensors))
        found = [leaf for _, leaf in leaves(self.model(*args, **kwargs))]
        kept = tuple(leaf for leaf in found if leaf is not None)
        return kept[0] if len(kept) == 1 else kept


class _FlatOne(_Flat):
    def forward(self, a: Tensor) -> Any:
        return self.run(a)


class _FlatTwo(_Flat):
    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.run(a, b)


def graph_of(model: nn.Module, example: Example) -> fx.GraphModule:
    """Returns the graph of a model, with the names of inputs and outputs and the batch axes in `meta`."""
    tensors = flatten(example)
    graph = trace((_FlatOne if len(tensors) == 1 else _FlatTwo)(model, example), tensors)
    graph.meta["inputs"] = input_names(model, example)
    graph.meta["batch_axes"] = batch_axes(tensors)
    graph.meta["outputs"] = output_leaves(call(model, example))[0]
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, name in zip(places, graph.meta["inputs"], strict=True):
        node.meta["site"] = name
    return graph
