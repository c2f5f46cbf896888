"""Computes Swin's window attention, for feature maps and clips, by operators that can be quantized.

    order     [N, *map, C] → [N·windows, tokens, C]       pad, and one Gather for the shift and the partition
    attend    q·kᵀ / sqrt(C/heads) + bias (+ mask)        [N·windows, heads, tokens, tokens]
    back      [N·windows, tokens, C] → [N, *map, C]       one Gather

torchvision's `shifted_window_attention` and `shifted_window_attention_3d` are functions that are one node in torch.fx,
so their two Linears and two MatMuls would all stay in floating point. A module is built for one size of the
map, on which its mask and padding depend. The map may have any number of axes.
Sources: Liu et al., "Swin Transformer", 2021; "Swin Transformer V2", 2022 (cosine attention); "Video Swin
Transformer", 2022.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.attention.self_attention import per_image, similarity, split_heads


@dataclass(frozen=True)
class Windows:
    """The partition of a map [N, *size, C] into windows.

    Attributes:
        size: the size of the map: rows and columns, or frames, rows and columns.
        window, shift: the size of a window and its shift along these axes; a shift is 0 where one window covers the
            whole map.
    """

    size: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...]

    @property
    def padded(self) -> tuple[int, ...]:
        """The size, rounded up to multiples of the window."""
        return tuple(-(-s // w) * w for s, w in zip(self.size, self.window, strict=True))

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of windows along every axis."""
        return tuple(p // w for p, w in zip(self.padded, self.window, strict=True))

    @property
    def tokens(self) -> int:
        return math.prod(self.window)

    @property
    def padding(self) -> tuple[int, ...]:
        """The padding in the order of `F.pad`, with the last axis (the channels) first."""
        missing = [p - s for p, s in zip(self.padded, self.size, strict=True)]
        return (0, 0, *(end for m in reversed(missing) for end in (0, m)))

    @property
    def count(self) -> int:
        return math.prod(self.grid)

    def cut(self, grid: Tensor) -> Tensor:
        """Cuts a grid [*padded] into [windows, tokens]."""
        axes = range(2 * len(self.size))
        sides = itertools.chain.from_iterable(zip(self.grid, self.window, strict=True))
        apart = grid.reshape(tuple(sides)).permute(*axes[::2], *axes[1::2])
        return apart.reshape(self.count, self.tokens)

    def order(self) -> Tensor:
        """Returns the token at each position in the windows, as row-major indices into the padded map.

        The shape is [windows · tokens].
        """
        grid = torch.arange(math.prod(self.padded)).reshape(self.padded)
        return self.cut(grid.roll([-s for s in self.shift], tuple(range(grid.ndim)))).reshape(-1)

    def back(self) -> Tensor:
        """Returns each map token's position in the windows; tokens are in row-major order, [prod(size)]."""
        places = torch.argsort(self.order()).reshape(self.padded)
        return places[tuple(slice(n) for n in self.size)].reshape(-1)

    def regions(self) -> Tensor:
        """Returns the index of each token's region, [windows, tokens].

        Tokens of one window are in different regions if only the shift has brought them together.
        """
        spans = [
            (slice(0, -w), slice(-w, -s), slice(-s, None)) if s else (slice(None),)
            for w, s in zip(self.window, self.shift, strict=True)
        ]
        region = torch.zeros(self.padded)
        for i, block in enumerate(itertools.product(*spans)):
            region[block] = i
        return self.cut(region)


class WindowAttention(nn.Module):
    """The attention of `shifted_window_attention` (Swin), 2-D or 3-D, for one feature map size.

    Its outputs agree with torchvision's to 1e-5.

    Args:
        qkv, proj: the two Linears of the attention.
        heads: the number of attention heads.
        windows: the windows that the feature map is divided into.
        attention_dropout, dropout: dropout rates of the attention weights and of the output.
    """

    regions: Tensor
    order: Tensor
    back: Tensor

    def __init__(
        self,
        qkv: nn.Linear,
        proj: nn.Linear,
        heads: int,
        windows: Windows,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads, self.windows = qkv, proj, heads, windows
        self.attention_drop, self.drop = nn.Dropout(attention_dropout), nn.Dropout(dropout)
        # One Gather in each direction (before the attention in 8 bits) saves a roll, a reshape and a Transpose.
        self.register_buffer("order", windows.order(), persistent=False)
        self.register_buffer("back", windows.back(), persistent=False)
        if any(windows.shift):
            self.register_buffer("regions", windows.regions(), persistent=False)

    def mask(self) -> Tensor:
        """Returns the mask [windows, 1, tokens, tokens]: -100 between tokens of different regions, else 0.

        The graph computes it from the regions; stored, it would be hundreds of times larger on clips.
        """
        apart = self.regions.unsqueeze(1) != self.regions.unsqueeze(2)
        return (apart * -100.0).unsqueeze(1)

    def scores(self, q: Tensor, k: Tensor, *_: Tensor) -> Tensor:
        """Returns the scores of q and k.

        Args:
            q, k: [1, windows·heads, tokens, width].

        Returns:
            [windows, heads, tokens, tokens]
        """
        return per_image(similarity(q, k, q_scale(self.qkv, self.heads)), self.heads)

    def attend(self, x: Tensor, bias: Tensor, *extra: Tensor) -> Tensor:
        """Computes attention of x [N, *size, C] with bias [1, heads, tokens, tokens]; returns [N, *size, C]."""
        windows, channels, heads = self.windows, self.qkv.in_features, self.heads
        tokens = windows.tokens
        if any(windows.padding):
            x = F.pad(x, windows.padding)
        x = x.flatten(1, -2).index_select(1, self.order).reshape(-1, tokens, channels)
        q, k, v = split_heads(self.qkv(x), heads)
        scores = self.scores(q, k, *extra)
        if any(windows.shift):
            scores = scores.reshape(-1, windows.count, heads, tokens, tokens)
            scores = (scores + (self.mask() + bias)).reshape(-1, heads, tokens, tokens)
        else:
            scores = scores + bias
        weights = self.attention_drop(torch.softmax(scores, dim=-1))
        x = torch.matmul(weights, per_image(v, heads)).transpose(1, 2).reshape(-1, tokens, channels)
        x = self.drop(self.proj(x)).reshape(-1, windows.count * tokens, channels)
        return x.index_select(1, self.back).reshape(-1, *windows.size, channels)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.attend(x, bias)


class CosineWindowAttention(WindowAttention):
    """The window attention of Swin V2: cosine similarity times a learned scale per head, and keys without a bias."""

    def __init__(self, qkv: nn.Linear, proj: nn.Linear, heads: int, windows: Windows, *drops: float) -> None:
        super().__init__(qkv, proj, heads, windows, *drops)
        if qkv.bias is not None:
            # The original sets the keys' bias to zero on every call. Here it is zero and gets no gradient.
            third = qkv.bias.numel() // 3
            keep = torch.ones_like(qkv.bias.detach())
            keep[third : 2 * third] = 0.0
            with torch.no_grad():
                qkv.bias.mul_(keep)
            qkv.bias.register_hook(lambda grad: grad * keep.to(grad.device))

    def scores(self, q: Tensor, k: Tensor, *extra: Tensor) -> Tensor:
        """Returns the scores of q and k, in the shapes of the base class.

        `extra` is the logarithm of the scale, [heads, 1, 1]. The scale is at most 100.
        """
        cosine = per_image(similarity(F.normalize(q, dim=-1), F.normalize(k, dim=-1)), self.heads)
        return cosine * torch.clamp(extra[0], max=math.log(100.0)).exp()

    def forward(self, x: Tensor, bias: Tensor, logit_scale: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, bias, logit_scale)


def q_scale(qkv: nn.Linear, heads: int) -> float:
    """Returns the factor of the scores, 1 / sqrt(width of a head)."""
    return float((qkv.in_features // heads) ** -0.5)
