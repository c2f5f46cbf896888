"""Checks where small models have FakeQuantize modules, against complete lists written by hand."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from chain import SMALL, noise, prepared, small_vit
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM, QNNPACK
from qatkit.quant.fake_quantize import Bounds


class TwoConvs(nn.Module):
    """Base class of the models below, which take [N, 4, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last, self.pool = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.MaxPool2d(2)


class ReluReadTwice(TwoConvs):
    """A ReLU with two readers, which joins the convolution, since nothing else reads the latter's output."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return cast(Tensor, self.last(y) + y)


class ReadBeforeRelu(TwoConvs):
    """A ReLU that must not join the convolution, since the latter's output has another reader."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return cast(Tensor, self.last(F.relu(y) + y))


class TimesNumber(TwoConvs):
    """A product with a Python number, which runs in float."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.conv(x) * 0.5))


class Square(TwoConvs):
    """A product of a tensor with itself, which is a product of two 8-bit tensors."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return cast(Tensor, self.last(y * y))


class Flipped(TwoConvs):
    """A flip, which stays float since the operator table lacks it, and a transpose, which keeps its range."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.pool(self.conv(x)).flip(-1).transpose(2, 3)))


class Cropped(TwoConvs):
    """A crop of a float GELU; only the crop is quantized, so that dropped values do not widen the range."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.conv(x))
        return cast(Tensor, self.last(torch.split(y, [3, 5], 2)[0].transpose(2, 3)))


class PoolShares(TwoConvs):
    """A max pool and a transpose, which keep the range of the convolution before them."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.pool(self.conv(x)).transpose(2, 3)))


class PoolThenRelu(TwoConvs):
    """A ReLU after a max pool, which no convolution can absorb, so that it has its own quantizer."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(F.relu(self.pool(self.conv(x)))))


class FloatAdd(TwoConvs):
    """A sum with one operand from a float operator."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(torch.sin(self.conv(x)) + self.conv(x)))


class Gelu(TwoConvs):
    """A float activation between two convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.last(F.gelu(self.conv(x))))


class Relu6(TwoConvs):
    """A ReLU6 after each convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.last(F.relu6(self.conv(x))))


RELU: Bounds = (0.0, None)
RELU6: Bounds = (0.0, 6.0)
SIGMOID: Bounds = (0.0, 1.0)
FREE: Bounds = (None, None)
LOCAL: dict[str, type[nn.Module]] = {
    k.__name__: k
    for k in (
        ReluReadTwice, ReadBeforeRelu, TimesNumber, Square, Flipped, Cropped, PoolShares, PoolThenRelu,
        FloatAdd, Gelu, Relu6,
    )
}  # fmt: skip

EXPECTED: dict[str, dict[str, Bounds]] = {
    "chain": {"input": FREE, "conv1": RELU, "conv2": RELU6, "conv3": FREE},
    "mlp": {"input": FREE, "fc1": RELU},
    "residual": {"input": FREE, "stem": RELU, "conv1": RELU, "conv2": FREE, "add": RELU, "avgpool": FREE},
    "conv_flatten_linear": {"input": FREE, "conv": FREE},
    "block": {"norm1": FREE, "attn.matmul_1": FREE, "norm2": FREE, "act": FREE},
    "gate": {
        "input": FREE, "conv": FREE, "pool": FREE, "fc1": RELU, "fc2": FREE, "gate": SIGMOID, "mul": FREE,
        "last": FREE,
    },
    "hard_gate": {
        "input": FREE, "conv": FREE, "pool": FREE, "fc1": RELU, "fc2": FREE, "gate": SIGMOID, "mul": FREE,
        "last": FREE,
    },
    "concat": {"input": FREE, "left": FREE, "right": RELU, "cat": FREE, "last": FREE},
    "gated": {
        "input": FREE, "conv1": FREE, "act1.gate": SIGMOID, "act1.mul": FREE, "conv2": FREE,
        "act2": FREE, "conv3": FREE,
    },
    "twice": {"input": FREE, "conv": RELU, "conv_1": RELU, "last": FREE},
    "ReluReadTwice": {"input": FREE, "conv": RELU, "last": FREE, "add": FREE},
    "ReadBeforeRelu": {"input": FREE, "conv": FREE, "relu": FREE, "add": FREE, "last": FREE},
    "TimesNumber": {"input": FREE, "conv": FREE, "mul": FREE, "last": FREE},
    "Square": {"input": FREE, "conv": FREE, "mul": FREE, "last": FREE},
    "Flipped": {"input": FREE, "conv": FREE, "flip": FREE, "last": FREE},
    "Cropped": {"input": FREE, "conv": FREE, "getitem": FREE, "last": FREE},
    "PoolShares": {"input": FREE, "conv": FREE, "last": FREE},
    "PoolThenRelu": {"input": FREE, "conv": FREE, "relu": FREE, "last": FREE},
    "FloatAdd": {"input": FREE, "conv": FREE, "conv_1": FREE, "add": FREE, "last": FREE},
    "Gelu": {"input": FREE, "conv": FREE, "gelu": FREE, "last": FREE},
    "Relu6": {"input": FREE, "conv": RELU6, "last": RELU6},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_points_by_hand(name: str) -> None:
    kind, shape = SMALL[name] if name in SMALL else (LOCAL[name], (4, 8, 8))
    found = fake_quantizers(prepared(kind(), noise(2, *shape)))
    assert {k: m.bounds for k, m in found.items()} == EXPECTED[name]
    assert list(found) == list(EXPECTED[name])
    assert [k for k, m in found.items() if m.observer is None] == [
        f"{k}" for k, v in EXPECTED[name].items() if v == SIGMOID
    ]


@pytest.mark.parametrize("name", EXPECTED)
def test_switched_off_the_prepared_graph_computes_the_model(name: str) -> None:
    kind, shape = SMALL[name] if name in SMALL else (LOCAL[name], (4, 8, 8))
    torch.manual_seed(0)
    model, x = kind().eval(), noise(3, *shape)
    torch.testing.assert_close(prepared(model, x)(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_two_backends_agree_on_places() -> None:
    for kind, shape in SMALL.values():
        x = noise(2, *shape)
        places = [list(fake_quantizers(prepared(kind(), x, backend))) for backend in (FBGEMM, QNNPACK)]
        assert places[0] == places[1]


def test_the_residual_stream_of_a_transformer_stays_float() -> None:
    names = list(fake_quantizers(prepared(small_vit(), noise(2, 3, 32, 32))))
    # mlp.1 is the GELU; the Dropout after it keeps its 8-bit values.
    layer = "encoder.layers.encoder_layer_{}."
    inner = ["ln_1", "self_attention.matmul_1", "ln_2", "mlp.1"]
    assert names == [
        "input",
        "conv_proj",
        *(layer.format(i) + name for i in range(2) for name in inner),
        "getitem",  # x[:, 0]
    ]


def test_every_operator_of_a_transformer() -> None:
    """With `everywhere`, arithmetic between tensors is quantized, including the residual stream."""
    graph = prepared(small_vit(), noise(2, 3, 32, 32), FBGEMM.everywhere())
    names = set(fake_quantizers(graph))
    layer = "encoder.layers.encoder_layer_{}."
    attention = ["qkv", "matmul", "softmax", "matmul_1", "out_proj"]
    inner = [
        "ln_1",
        *(f"self_attention.{name}" for name in attention),
        "add",
        "ln_2",
        "mlp.0",
        "mlp.1",
        "mlp.3",
        "add_1",
    ]
    ends = {"input", "conv_proj", "cat", "encoder.add", "encoder.ln", "heads.head"}
    # The product of queries with a number always stays float.
    assert names == ends | {layer.format(i) + name for i in range(2) for name in inner}


def test_an_operator_with_a_float_input_is_reported() -> None:
    x = noise(2, 4, 8, 8)
    result = prepare_qat(stub(fuse(FloatAdd(), x).graph, x).graph, FBGEMM, x)
    assert result.skipped == [("add", "add stays float because of a float input: sin")]
    assert result.changed == 5
