"""Conformer for keyword spotting: self-attention and depthwise convolutions over the features of a recording.

    features [N, 1, frames, bands] ── two convolutions, a quarter of the bands, half the frames ── Linear ── blocks
    block: x + half a feed-forward ── + self-attention ── + convolution ── + half a feed-forward ── LayerNorm
    blocks ── mean over frames ── Linear ──> logits

Source: Gulati et al., "Conformer: Convolution-augmented Transformer for Speech Recognition", 2020,
https://arxiv.org/abs/2005.08100. Attention has no positional encoding: the convolutions before it already distinguish
positions, and without a table of distances any number of frames fits.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Sequential):
    """LayerNorm, a Linear to `inner` features, Swish, and a Linear back."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__(
            nn.LayerNorm(width),
            nn.Linear(width, inner),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Linear(inner, width),
            nn.Dropout(dropout),
        )


class Attention(nn.Module):
    """LayerNorm and self-attention of several heads, [N, frames, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return cast(Tensor, self.dropout(self.attention(x, x, x, need_weights=False)[0]))


class Convolution(nn.Module):
    """LayerNorm, a gated Linear (GLU), a depthwise convolution over frames, BatchNorm, Swish, and a Linear."""

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width, bias=False)
        self.batch_norm = nn.BatchNorm1d(width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        gated = self.value(x) * self.gate(x).sigmoid()
        found = F.silu(self.batch_norm(self.depthwise(gated.transpose(1, 2)))).transpose(1, 2)
        return cast(Tensor, self.dropout(self.project(found)))


class ConformerBlock(nn.Module):
    """A feed-forward, attention, convolution and a feed-forward, each added to its input; then a LayerNorm.

    The outputs of the feed-forwards are halved.
    """

    def __init__(self, width: int, heads: int, expansion: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.first = FeedForward(width, expansion * width, dropout)
        self.attention = Attention(width, heads, dropout)
        self.convolution = Convolution(width, kernel, dropout)
        self.last = FeedForward(width, expansion * width, dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x)
        x = x + self.convolution(x)
        return cast(Tensor, self.norm(x + 0.5 * self.last(x)))


class Conformer(nn.Module):
    """A Conformer from features [N, 1, frames, bands] to logits [N, num_classes].

    Args:
        num_classes: number of logits.
        bands: number of bands of the features: `data.mels`, or `data.coefficients` for MFCCs.
        width: number of features between the blocks.
        blocks: number of blocks.
        heads: number of attention heads, each with `width / heads` features.
        expansion: number of features within a feed-forward, as a multiple of `width`.
        kernel: number of frames that a depthwise convolution covers; it must be odd.
        dropout: share of values dropped in training.
    """

    def __init__(
        self,
        num_classes: int = 10,
        bands: int = 40,
        width: int = 64,
        blocks: int = 2,
        heads: int = 4,
        expansion: int = 4,
        kernel: int = 15,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        channels = width // 2
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=(1, 2), padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        self.embed = nn.Linear(channels * (-(-bands // 4)), width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(ConformerBlock(width, heads, expansion, kernel, dropout) for _ in range(blocks))
        )
        self.classify = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.stem(x).transpose(1, 2).flatten(2)
        found = self.blocks(self.dropout(self.embed(frames)))
        return cast(Tensor, self.classify(found.mean(1)))
