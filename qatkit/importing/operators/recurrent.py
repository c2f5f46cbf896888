"""LSTM, GRU and RNN with constant weights, as torch's own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qatkit.importing.operators.table import Array, Node, UnsupportedError, Value, module
from qatkit.importing.operators.values import tensor

# Gates in torch's order, as indices in ONNX's order: LSTM i o f c, GRU z r h.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_KINDS: dict[str, type[Any]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
_ACTIVATIONS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}


class Recurrent(nn.Module):
    """A recurrent layer with the inputs and outputs of ONNX.

    Args:
        inner: the torch layer, for inputs [time, batch, values].
        reverse: whether the layer runs backwards; the inner layer then runs forwards on the reversed
            sequence.
        batch_first: whether the node has `layout=1`.
    """

    one_operator = True
    positional = True  # forward takes all inputs of the node, including constants

    def __init__(self, inner: nn.RNNBase, reverse: bool, batch_first: bool) -> None:
        super().__init__()
        self.inner, self.reverse, self.batch_first = inner, reverse, batch_first

    def forward(
        self, x: Tensor, weight: None = None, recurrent: None = None, bias: None = None, lengths: Value = None,
        h: Value = None, c: Value = None, peepholes: None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x = x.transpose(0, 1) if self.batch_first else x
        if isinstance(lengths, np.ndarray) and (lengths != x.shape[0]).any():
            raise UnsupportedError("its sequence_lens differ from the length of the input")
        x = torch.flip(x, (0,)) if self.reverse else x
        lstm = isinstance(self.inner, nn.LSTM)
        state = self._state(x, h, c) if lstm else self._state(x, h)
        given = () if state is None else (state if lstm else state[0],)
        y, last = self.inner(x, *given)
        directions = 2 if self.inner.bidirectional else 1
        y = y.reshape(*y.shape[:2], directions, self.inner.hidden_size).permute(0, 2, 1, 3)
        y = torch.flip(y, (0,)) if self.reverse else y
        ends = tuple(last) if lstm else (last,)
        if self.batch_first:
            return (y.permute(2, 0, 1, 3), *(end.transpose(0, 1) for end in ends))
        return (y, *ends)

    def _state(self, x: Tensor, *given: Value) -> tuple[Tensor, ...] | None:
        if all(value is None or (isinstance(value, np.ndarray) and not value.any()) for value in given):
            return None  # zeros, torch's default
        directions = 2 if self.inner.bidirectional else 1
        states = []
        for value in given:
            if value is None:
                states.append(x.new_zeros(directions, x.shape[1], self.inner.hidden_size))
                continue
            state = tensor(value, x)
            state = state.transpose(0, 1) if self.batch_first else state
            states.append(state.expand(-1, x.shape[1], -1).contiguous())
        return tuple(states)


def why_not(node: Node, constants: Sequence[Array | None]) -> str:
    """Returns why torch's modules do not support a recurrent node, such as "LSTM with peepholes"; "" if they do."""
    kind = node.op_type
    names = [str(name).lower() for name in node.get("activations") or []]
    known = _ACTIVATIONS[kind]
    plain = not names or all(names[i : i + len(known)] == known for i in range(0, len(names), len(known)))
    relu = kind == "RNN" and bool(names) and set(names) == {"relu"}
    reasons = {
        "computed weights": any(value is None for value in constants[1:3]),
        "a computed bias": len(node.inputs) > 3 and bool(node.inputs[3]) and constants[3] is None,
        "peepholes": len(node.inputs) > 7 and bool(node.inputs[7]),
        "a clip": bool(node.get("clip", 0)),
        "input_forget": bool(node.get("input_forget", 0)),
        f"activations {', '.join(names)}": not plain and not relu,
        "sequence lengths": len(node.inputs) > 4 and bool(node.inputs[4]) and not _known(constants[4]),
        "linear_before_reset=0": kind == "GRU" and not node.get("linear_before_reset", 0),
    }
    return next((f"{kind} with {reason}" for reason, found in reasons.items() if found), "")


def _known(lengths: Array | None) -> bool:
    """Returns whether the lengths are constant and equal; when the node runs, they must equal the input's length."""
    return lengths is not None and bool((lengths == lengths.reshape(-1)[:1]).all())


@module("LSTM", "GRU", "RNN")
def recurrent(node: Node, constants: Sequence[Array | None]) -> nn.Module:
    """Returns a recurrent layer of torch, with the weights of the node's gates in torch's order.

    Raises:
        UnsupportedError: torch has no such layer.
    """
    if reason := why_not(node, constants):
        raise UnsupportedError(f"{reason} has no PyTorch equivalent")
    kind, weight, hidden = node.op_type, constants[1], constants[2]
    assert weight is not None and hidden is not None
    size, direction = hidden.shape[2], node.get("direction", "forward")
    bias = constants[3] if len(constants) > 3 else None
    names = [str(name).lower() for name in node.get("activations") or []]
    settings = {"nonlinearity": "relu"} if kind == "RNN" and names and names[0] == "relu" else {}
    inner = _KINDS[kind](
        weight.shape[2], size, bias=True, bidirectional=direction == "bidirectional", **settings
    )
    rows = np.concatenate([np.arange(size) + gate * size for gate in _GATES[kind]])
    for side in range(weight.shape[0]):
        suffix = "_l0_reverse" if side else "_l0"
        halves = np.zeros((2, len(rows)), np.float32) if bias is None else bias[side].reshape(2, -1)
        values = {
            "weight_ih": weight[side],
            "weight_hh": hidden[side],
            "bias_ih": halves[0],
            "bias_hh": halves[1],
        }
        for name, value in values.items():
            getattr(inner, name + suffix).data = torch.from_numpy(np.array(value[rows], np.float32))
    return Recurrent(inner, direction == "reverse", bool(node.get("layout", 0)))
