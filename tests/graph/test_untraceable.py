"""Tests of modules that torch.fx cannot trace: replacements equal originals; float leaves are noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from chain import noise, run_ort, run_torch, ship
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.graph.trace import trace
from qatkit.quant.backends import FBGEMM
from qatkit.quant.qat_layers import QATOperator


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"dim_feedforward": 32, "batch_first": True} | options
    found = nn.TransformerEncoderLayer(16, 4, **settings).eval()
    for norm in (found.norm1, found.norm2):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return found


class Derived(nn.TransformerEncoderLayer):
    """A user's layer that does not change the forward."""


class Masked(nn.Module):
    """An encoder that is called with a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.encoder(x, mask=self.mask, is_causal=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norm_last": layer,
    "norm_first": lambda: layer(norm_first=True),
    "sequence_first": lambda: layer(batch_first=False),
    "gelu": lambda: layer(activation="gelu"),
    "activation_module": lambda: layer(activation=nn.ReLU()),
    "activation_function": lambda: layer(activation=F.silu),
    "no_bias": lambda: layer(bias=False),
    "derived": lambda: Derived(16, 4, 32, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(layer(), 2, nn.LayerNorm(16), enable_nested_tensor=False),
    "masked": Masked,
}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_twin_equals_the_original(name: str) -> None:
    model, x = MODELS[name]().eval(), noise(3, 6, 16)
    graph = stub(trace(model, x), x).graph.eval()
    # The original takes its fast path only without gradients.
    torch.testing.assert_close(graph(x), model(x), rtol=0, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=0, atol=1e-5)


def test_a_checkpoint_keeps_its_names() -> None:
    model = nn.Sequential(layer(), nn.Linear(16, 4))
    assert trace(model, noise(3, 6, 16)).state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_runs_in_int8_in_the_file(norm_first: bool) -> None:
    model = nn.Sequential(layer(norm_first=norm_first), nn.Linear(16, 4)).eval()
    x = noise(64, 6, 16)
    case = ship(model, x, f"encoder_layer_{norm_first}")
    inside = {
        n for n, m in case.simulated.named_modules() if isinstance(m, QATOperator) and m.weight_fake_quant
    }
    assert inside == {"0.self_attn.qkv", "0.self_attn.out_proj", "0.linear1", "0.linear2", "1"}
    expected, found = run_torch(model, x), run_torch(case.converted, x)
    assert abs(expected - found).max() < 0.05 * (expected.max() - expected.min())
    assert abs(run_ort(case.path, x) - found).max() < 0.02 * (found.max() - found.min())


class Leaf(nn.Module):
    """A leaf with weights between two Linears."""

    def __init__(self, leaf: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.first, self.leaf, self.last = nn.Linear(16, 16), leaf, nn.Linear(width, 4)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.call(self.leaf, self.first(x))))


# How a leaf is made and called, the width of its output, and its reported reason ("" if it runs in int8).
LEAVES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor], int, str]] = {
    "GRU": (lambda: nn.GRU(16, 8, batch_first=True), lambda m, x: m(x)[0], 8, "weight-only int8"),
    "LSTM": (lambda: nn.LSTM(16, 8, batch_first=True), lambda m, x: m(x)[0], 8, "weight-only int8"),
    "Bilinear": (lambda: nn.Bilinear(16, 16, 8), lambda m, x: m(x, x), 8, ""),
    "Embedding": (lambda: nn.Embedding(4, 8), lambda m, x: m((x[..., 0] > 0).long()), 8, "weight-only int8"),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(6, 6, 2, 2), lambda m, x: m(x), 32, ""),
    "PReLU": (nn.PReLU, lambda m, x: m(x), 16, "PReLU stays float: only convolutions, Linear, "),
}  # fmt: skip


@pytest.mark.parametrize("name", list(LEAVES))
def test_a_leaf_with_weights_is_never_left_float_in_silence(name: str) -> None:
    make, call, width, said = LEAVES[name]
    torch.manual_seed(0)
    model, x = Leaf(make(), call, width).eval(), noise(4, 6, 16)
    graph = stub(fuse(model, x).graph, x).graph
    prepared = prepare_qat(graph, FBGEMM, x)
    assert [reason[: len(said)] for _, reason in prepared.skipped] == ([said] if said else [])
    inside = [m for path, m in prepared.graph.named_modules() if path.startswith("leaf")]
    assert any(isinstance(module, QATOperator) for module in inside) == (said == "")
    torch.testing.assert_close(prepared.graph.eval()(x), model(x), rtol=0, atol=1e-5)
