"""A recurrent keyword spotter that runs in steps: a Linear for each frame, then a GRU with a state.

    features [N, 1, frames, bands] ── Linear, ReLU, frame by frame ── GRU (state) ── last frame ── Linear ──> logits

Only the GRU connects frames, so a recording may come in chunks of any length: passing the state after one
chunk to the next gives the same logits. `export.stream` writes a file with the state as input and output.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class StreamingGRU(nn.Module):
    """A model from features [N, 1, frames, bands] to the logits [N, num_classes] after the last frame.

    Args:
        num_classes: number of logits.
        bands: number of bands of the features: `data.mels`, or `data.coefficients` for MFCCs.
        width: number of features of a frame at the GRU's input.
        hidden: size of the state.
        layers: number of layers of the GRU.
        dropout: share of values dropped in training, before the last Linear and between layers.
    """

    def __init__(
        self,
        num_classes: int = 10,
        bands: int = 40,
        width: int = 64,
        hidden: int = 128,
        layers: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(bands, width), nn.ReLU())
        self.gru = nn.GRU(width, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        heard, _ = self.gru(self.embed(x.squeeze(1)))
        return cast(Tensor, self.classify(self.dropout(heard[:, -1])))
