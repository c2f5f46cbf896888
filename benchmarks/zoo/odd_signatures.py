"""Models with unusual signatures: several inputs, integers, keyword arguments, defaults, nested outputs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.entry import List, image, mask, tokens, vector
from zoo.odd_branches import body

odd = List("odd")
ENTRIES = odd.entries


@odd((image(3, 32, 32), image(3, 32, 32)))
class TwoImages(nn.Module):
    """Change detection: two images go through one tower, and their difference is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = body(), nn.Linear(16, 4)

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        return self.head((self.tower(before) - self.tower(after)).abs().mean((2, 3)))


@odd({"picture": image(3, 32, 32), "facts": vector(6)})
class ImageAndVector(nn.Module):
    """An image and a vector as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.facts, self.head = body(), nn.Linear(6, 16), nn.Linear(32, 4)

    def forward(self, picture: Tensor, facts: Tensor) -> Tensor:
        return self.head(torch.cat([self.tower(picture).mean((2, 3)), F.relu(self.facts(facts))], dim=-1))


@odd({"picture": image(3, 32, 32), "ids": tokens(40, 8), "mask": mask(8)})
class ImageAndTokens(nn.Module):
    """A question about an image: the image, token ids and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.embed = body(), nn.Embedding(40, 16)
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, picture: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        words = self.embed(ids)
        places = self.tower(picture).flatten(2).transpose(1, 2)
        found = self.attention(words, places, places, need_weights=False)[0]
        if mask is not None:
            found = found * mask[:, :, None].type_as(found)
        return self.head(found.sum(dim=1))


@odd({"x": image(3, 32, 32), "scale": vector(1)})
class Defaults(nn.Module):
    """Keyword arguments with defaults: a flag, None, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = body(), nn.Linear(16, 4)

    def forward(
        self, x: Tensor, *, features: bool = False, scale: Tensor | None = None, shift: float = 0.5
    ) -> Tensor:
        x = self.tower(x).mean((2, 3))
        if features:
            return x
        if scale is not None:
            x = x * scale
        return self.head(x + shift)


@odd((image(3, 32, 32), (vector(4), vector(5))))
class NestedInput(nn.Module):
    """A tuple of tensors, such as a recurrent state, as the second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.first, self.second, self.head = (
            body(),
            nn.Linear(4, 8),
            nn.Linear(5, 8),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        a, b = torch.tanh(self.first(state[0])), torch.tanh(self.second(state[1]))
        return self.head(torch.cat([self.tower(x).mean((2, 3)), a, b], 1)), (a, b)


@odd({"batch": {"image": image(3, 32, 32), "age": vector(1)}})
class DictInput(nn.Module):
    """One argument that is a dict of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = body(), nn.Linear(17, 4)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.head(torch.cat([self.tower(batch["image"]).mean((2, 3)), batch["age"]], 1))}


class Both(nn.Module):
    """The base of the models below: a tower with logits and features."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = body(), nn.Linear(16, 4)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [N, 4] and features [N, 16, H/4, W/4]."""
        features = self.tower(x)
        return self.head(features.mean((2, 3))), features


@odd(image(3, 32, 32))
class OutputDict(Both):
    """A dict as the output."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits, features = self.both(x)
        return OrderedDict(out=logits, aux=features)


@odd(image(3, 32, 32))
class OutputNested(Both):
    """A list in a tuple in a dict as the output."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits, features = self.both(x)
        return {"logits": logits, "maps": (features, [features * 2, features.mean(1)])}


@dataclass
class Result:
    """The output of `OutputDataclass`."""

    logits: Tensor
    features: Tensor | None = None


@odd(image(3, 32, 32))
class OutputDataclass(Both):
    """A dataclass as the output."""

    def forward(self, x: Tensor) -> Result:
        return Result(*self.both(x))


class Pair(NamedTuple):
    """The output of `OutputNamedTuple`."""

    logits: Tensor
    features: Tensor


@odd(image(3, 32, 32))
class OutputNamedTuple(Both):
    """A NamedTuple as the output."""

    def forward(self, x: Tensor) -> Pair:
        return Pair(*self.both(x))


@odd(image(3, 32, 32))
class OutputNone(Both):
    """A tuple of outputs with None and with the same tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
        logits, _ = self.both(x)
        return logits, None, logits


@odd(image(3, 32, 32))
class Argmax(Both):
    """A model that ends with argmax: int64 class indices."""

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x)[0].softmax(1).argmax(dim=1)


@odd(image(3, 32, 32))
class TopClasses(Both):
    """Scores and class indices by `topk`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.both(x)[0].softmax(1).topk(2, dim=1)
        return found.values, found.indices


@odd(image(3, 32, 32))
class Threshold(Both):
    """A boolean mask as the output."""

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x)[0].sigmoid() > 0.5


@odd(image(3, 32, 32))
class PassThrough(Both):
    """The input as an output, and an output that is a view of another."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _ = self.both(x)
        return x, logits, logits[:, :2]


@odd(tokens(40, 8))
class IntegerArithmetic(nn.Module):
    """Arithmetic on ids before the embedding: a shift, a clamp, `ne`, positions by cumsum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position, self.head = nn.Embedding(41, 16), nn.Embedding(9, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        shown = ids.ne(0).long()
        position = torch.cumsum(shown, dim=1) * shown
        x = self.embed((ids + 1).clamp(max=40)) + self.position(position)
        return self.head(x.sum(1) / shown.sum(1, keepdim=True).clamp(min=1).float())


@odd((lambda n, g: torch.randint(0, 256, (n, 3, 32, 32), generator=g, dtype=torch.uint8)))
class Uint8Input(nn.Module):
    """Pixels as uint8, normalized in forward with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = body(), nn.Linear(16, 4)
        self.register_buffer("mean", torch.tensor([120.0, 115.0, 104.0]).view(1, 3, 1, 1))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower((x.float() - self.mean) / 58.0).mean((2, 3)))
