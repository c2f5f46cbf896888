"""LSTM, GRU and RNN of a converted graph, with int8 weights and one scale per row as in the file.

A layer is one call of `qatkit::recurrent`, which is exported as ONNX's LSTM, GRU or RNN. Gates are in ONNX's order, so
that in the file only a dequantize is between a weight and its reader. When called, it computes in float with exactly
these weights, as ONNX Runtime does.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from qatkit.quant.recurrent_layers import QATRecurrent

# The index of torch's gate at each place of ONNX's order: i f g o → i o f c, r z n → z r h.
_ORDERS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}
_RUN: dict[str, Any] = {"GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}
_Results = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op("qatkit::recurrent", mutates_args=())
def recurrent(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    hidden: Tensor | None,
    cell: Tensor | None,
    mode: str,
    size: int,
) -> _Results:
    """Runs one layer in one direction or in both.

    Args:
        x: [steps, batch, inputs].
        weights: the weight for the inputs, int8 [directions, gates · size, inputs], its scales
            [directions, gates · size, 1] and, if there are any, its zero points in the same shape; then the same
            tensors for the hidden state. Gates are in ONNX's order.
        bias: the biases for the inputs and for the hidden state, [directions, 2 · gates · size], or None.
        hidden, cell: initial states [directions, batch, size]; None means zeros.
        mode: one of the modes of `nn.RNNBase`.
        size: the size of the hidden state.

    Returns:
        The outputs [steps, batch, directions · size], the last hidden state, and the last cell state of an LSTM (of a
        GRU or RNN, the hidden state again).
    """
    of_inputs, of_hidden = (_dequantized(*parts) for parts in of_each(weights))
    flat = []
    for direction in range(len(of_inputs)):
        flat += [_to_torch(of_inputs[direction], mode), _to_torch(of_hidden[direction], mode)]
        flat += [] if bias is None else [_to_torch(part, mode) for part in bias[direction].chunk(2)]
    both = len(of_inputs) == 2
    zeros = x.new_zeros(len(of_inputs), x.shape[1], size)
    settings = flat, bias is not None, 1, 0.0, False, both, False
    start = zeros if hidden is None else hidden
    if mode == "LSTM":
        return torch.lstm(x, (start, zeros if cell is None else cell), *settings)
    outputs, last = _RUN[mode](x, start, *settings)
    return outputs, last, last.clone()


@recurrent.register_fake
def _(x: Tensor, weights: list[Tensor], *others: Any) -> _Results:
    size = others[-1]
    directions = len(weights[0])
    state = x.new_empty(directions, x.shape[1], size)
    return x.new_empty(x.shape[0], x.shape[1], directions * size), state, torch.empty_like(state)


def of_each(weights: list[Any]) -> tuple[list[Any], list[Any]]:
    """Splits the weights of `recurrent` into the tensors for the inputs and those for the hidden state."""
    count = len(weights) // 2
    return weights[:count], weights[count:]


def _dequantized(q: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    counted = q.to(scale.dtype) if zero is None else q.to(scale.dtype) - zero.to(scale.dtype)
    return counted * scale


def _to_onnx(rows: Tensor, mode: str) -> Tensor:
    """Reorders rows [gates · size, ...] from torch's to ONNX's order of gates."""
    return torch.cat([rows.chunk(len(_ORDERS[mode]))[i] for i in _ORDERS[mode]])


def _to_torch(rows: Tensor, mode: str) -> Tensor:
    gates = rows.chunk(len(_ORDERS[mode]))
    return torch.cat([gates[_ORDERS[mode].index(i)] for i in range(len(gates))])


class QuantizedRecurrent(nn.Module):
    """An LSTM, GRU or RNN whose weights are int8.

    Buffers of layer N:
        weight_ih_lN, weight_hh_lN: int8 [directions, gates · size, inputs].
        weight_ih_lN_scale, weight_hh_lN_scale: [directions, gates · size, 1].
        weight_ih_lN_zero_point, weight_hh_lN_zero_point: in the same shape, if the type has zero points.
        bias_lN: [directions, 2 · gates · size], if the layer has biases.
    """

    def __init__(self, module: QATRecurrent) -> None:
        super().__init__()
        self.mode, self.size, self.layers = module.mode, module.hidden_size, module.num_layers
        self.batch_first, self.biased = module.batch_first, bool(module.bias)
        self.directions = ("", "_reverse") if module.bidirectional else ("",)
        for layer in range(self.layers):
            for name in (f"weight_ih_l{layer}", f"weight_hh_l{layer}"):
                self._hold(module, name)
            if self.biased:
                self.register_buffer(f"bias_l{layer}", self._bias(module, layer))

    def _hold(self, module: QATRecurrent, name: str) -> None:
        rows: dict[str, list[Tensor]] = {"": [], "_scale": [], "_zero_point": []}
        for direction in self.directions:
            weight = cast(Tensor, getattr(module, name + direction)).detach().float()
            quantizer = module.quantizer(name + direction)
            found = quantizer.integers(weight, None, torch.ones(()))
            rows[""].append(_to_onnx(found.weight, self.mode))
            for tail, one in (("_scale", found.scale), ("_zero_point", found.zero_point)):
                rows[tail].append(_to_onnx(one.expand(len(weight)), self.mode)[:, None])
            self.tails = ("", "_scale", "_zero_point") if quantizer.spec.has_zero_point else ("", "_scale")
        for tail in self.tails:
            self.register_buffer(name + tail, torch.stack(rows[tail]))

    def _bias(self, module: QATRecurrent, layer: int) -> Tensor:
        both = []
        for direction in self.directions:
            parts = (getattr(module, f"bias_{kind}_l{layer}{direction}") for kind in ("ih", "hh"))
            both.append(torch.cat([_to_onnx(part.detach().float(), self.mode) for part in parts]))
        return torch.stack(both)

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        """Returns (outputs, state) in torch's layout, with (hidden, cell) as the state of an LSTM.

        As in torch, the input may be unbatched.
        """
        batch = x.ndim == 3
        given = () if hx is None else hx if self.mode == "LSTM" else (hx,)
        axis = 0 if batch and self.batch_first else 1
        steps = x.transpose(0, 1) if axis == 0 else x if batch else x.unsqueeze(1)
        states = [state if batch else state.unsqueeze(1) for state in given]
        steps, found = self._run(steps, states)
        outputs = steps.transpose(0, 1) if axis == 0 else steps if batch else steps.squeeze(1)
        last = tuple(state if batch else state.squeeze(1) for state in found)
        return outputs, last if self.mode == "LSTM" else last[0]

    def _run(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Runs all layers on x [steps, batch, inputs]; returns the outputs and the last states of all layers."""
        collected: list[tuple[Tensor, ...]] = []
        count = len(self.directions)
        for layer in range(self.layers):
            names = (f"weight_ih_l{layer}", f"weight_hh_l{layer}")
            weights = [getattr(self, name + tail) for name in names for tail in self.tails]
            bias = getattr(self, f"bias_l{layer}") if self.biased else None
            own = [state[layer * count : (layer + 1) * count] for state in states]
            hidden, cell = (*own, None, None)[:2]
            x, *last = torch.ops.qatkit.recurrent(x, weights, bias, hidden, cell, self.mode, self.size)
            collected.append(tuple(last if self.mode == "LSTM" else last[:1]))
        return x, [torch.cat(parts) for parts in zip(*collected, strict=True)]
