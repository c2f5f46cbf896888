"""Modules of torch.nn rewritten as the products that they compute, so that each product gets its int8 kernel.

    Bilinear(a, b)              →  a Linear of a, then for each output a product with b, summed over its features
    LSTMCell, GRUCell, RNNCell  →  a Linear of the input and a Linear of the state; the gates stay float

They replace the originals before the capture, with the same parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OpenBilinear(nn.Bilinear):
    """Bilinear: Σ a_i · W[o, i, j] · b_j, first summed over i (a product with a weight), then over j."""

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        return bilinear(input1, input2, self.weight, self.bias)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `F.bilinear` of input1 [..., I] and input2 [..., J] with `weight` [O, I, J]; returns [..., O]."""
    rows = F.linear(input1, weight.transpose(1, 2).flatten(0, 1))
    by_output = rows.unflatten(-1, (weight.shape[0], weight.shape[2]))
    total = torch.matmul(by_output, input2.unsqueeze(-1)).squeeze(-1)
    return total if bias is None else total + bias


def _gates(cell: nn.RNNCellBase, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the products of the input and of the state with their weights, before the gates' activations."""
    return (
        F.linear(x, cell.weight_ih, cell.bias_ih if cell.bias else None),
        F.linear(hidden, cell.weight_hh, cell.bias_hh if cell.bias else None),
    )


def _zeros(cell: nn.RNNCellBase, x: Tensor) -> Tensor:
    return x.new_zeros((*x.shape[:-1], cell.hidden_size))


class OpenLSTMCell(nn.LSTMCell):
    """An LSTM cell: one time step."""

    def forward(
        self,
        input: Tensor,  # noqa: A002  torch's own name
        hx: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden, cell = (_zeros(self, input),) * 2 if hx is None else hx
        a, b = _gates(self, input, hidden)
        enter, keep, new, out = (a + b).chunk(4, -1)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(cell), cell


class OpenGRUCell(nn.GRUCell):
    """A GRU cell: one time step."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:  # noqa: A002
        hidden = _zeros(self, input) if hx is None else hx
        (r, z, n), (r_h, z_h, n_h) = (gates.chunk(3, -1) for gates in _gates(self, input, hidden))
        new = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
        return new + torch.sigmoid(z + z_h) * (hidden - new)


class OpenRNNCell(nn.RNNCell):
    """An Elman RNN cell: one time step."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:  # noqa: A002
        a, b = _gates(self, input, _zeros(self, input) if hx is None else hx)
        return torch.relu(a + b) if self.nonlinearity == "relu" else torch.tanh(a + b)
