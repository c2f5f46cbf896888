"""Tests of fusing BatchNorms: those of real networks all fold; where one cannot, a reason is given."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
from chain import Chain, build, noise, run_ort, run_torch, settle, ship
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.fuse import fuse
from qatkit.quant.qat_layers import QATConv2d
from qatkit_verify.errors import ConfigError


def norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("batch_norm", ["fold", "freeze"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"])
def test_every_batch_norm_of_a_real_network_fuses(name: str, batch_norm: str) -> None:
    model, x = build(name, 32), noise(2, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        result = fuse(model, x, batch_norm)
        got = result.graph(x)
    assert result.skipped == []
    assert result.changed == len(norms(model)) > 0
    assert len(norms(result.graph)) == (0 if batch_norm == "fold" else result.changed)
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], v) for k, v in before.items())


def test_modes_in_training() -> None:
    """Modes fold and freeze use the running statistics. Mode train uses the batch's, and updates them."""
    model, x = settle(Chain(), 3, 12, 12), noise(8, 3, 12, 12)
    frozen, live = model.eval()(x), copy.deepcopy(model).train()(x)
    for mode, expected in (("fold", frozen), ("freeze", frozen), ("train", live)):
        graph = fuse(copy.deepcopy(model), x, mode).graph.train()
        torch.testing.assert_close(graph(x), expected, rtol=1e-4, atol=1e-4)
        kinds = [type(graph.get_submodule(n)) for n in ("conv1", "conv2", "conv3")]
        assert kinds == [nn.Conv2d if mode == "fold" else QATConv2d] * 2 + [nn.Conv2d]
        if mode != "fold":
            bn = cast(Any, graph.get_submodule("conv1")).bn
            moved = not torch.equal(bn.running_mean, cast(Any, model).bn1.running_mean)
            assert moved is bn.training is (mode == "train")


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.batch_norm=thaw: expected one of fold, freeze, train"):
        fuse(Chain(), noise(2, 3, 12, 12), "thaw")


class NormFirst(nn.Module):
    """A BatchNorm before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv(self.bn(x)))


class TwoReaders(NormFirst):
    """A convolution whose output is read by the BatchNorm and by a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return cast(Tensor, self.bn(y) + y)


class SharedConv(nn.Module):
    """A convolution that is called twice, each time before another BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn1, self.bn2 = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn2(self.conv(self.bn1(self.conv(x)))))


class NoStatistics(NormFirst):
    """A BatchNorm that uses batch statistics in inference too."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(self.conv(x)))


class OtherAxis(nn.Module):
    """A BatchNorm1d after a Linear on [N, tokens, features]: its channels are the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(3, 5), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(self.fc(x.flatten(2))))


class SameWidthOtherAxis(OtherAxis):
    """A variant with as many tokens as features, so that sizes do not tell the axes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 3)


class SharedNorm(SharedConv):
    """A BatchNorm that is called after two convolutions, and folds into both."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn1(self.other(self.bn1(self.conv(x)))))


class ByKeyword(NoStatistics):
    """A convolution and a BatchNorm that are called with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(input=self.conv(input=x)))


@pytest.mark.parametrize(
    ("kind", "skipped"),
    [
        (NormFirst, [("bn", "its input is not the output of a Conv or Linear")]),
        (TwoReaders, [("bn", "the output of conv has other readers")]),
        (
            SharedConv,
            [("bn1", "conv is called more than once"), ("bn2", "conv_1 is called more than once")],
        ),
        (NoStatistics, [("bn", "it has no running statistics")]),
        (SharedNorm, []),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_what_cannot_fuse_says_why_and_computes_the_same(
    kind: type[nn.Module], skipped: list[tuple[str, str]]
) -> None:
    model, x = settle(kind(), 3, 4, 4), noise(2, 3, 4, 4)
    expected = model(x)
    result = fuse(model, x)
    assert result.skipped == skipped
    torch.testing.assert_close(result.graph(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [OtherAxis, SameWidthOtherAxis, ByKeyword])
def test_the_output_never_changes(kind: type[nn.Module]) -> None:
    model = kind()
    shape = (3, 4, 4) if kind is not OtherAxis else (3, 3, 1)
    settle(model, *shape)
    x = noise(2, *shape)
    expected = model(x)
    graph = fuse(model, x).graph
    torch.testing.assert_close(graph(x), expected, rtol=1e-4, atol=1e-5)


def test_an_input_given_by_name_is_one_like_any_other() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.rnn, self.fc = nn.Conv1d(4, 8, 1), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(input=self.conv(input=x)).transpose(1, 2)
            return cast(Tensor, self.fc(input=self.rnn(input=y, hx=y[:, :1].transpose(0, 1).contiguous())[0]))

    done = ship(Named().eval(), noise(4, 4, 6), "named")
    wanted = run_torch(done.converted, done.images)
    np.testing.assert_allclose(run_ort(done.path, done.images, optimize=False), wanted, atol=2e-6)
    exact = run_torch(done.model, done.images)
    assert np.square(wanted - exact).mean() < 1e-3 * np.square(exact).mean()


@pytest.mark.parametrize("batch_norm", ["fold", "freeze", "train"])
def test_a_batch_norm_that_others_read_lives_on(batch_norm: str) -> None:
    """A Diverse Branch Block pads with the norm's output for zeros, and so reads the norm's parameters."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.last = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            border = self.bn.bias.view(1, -1, 1, 1)
            y: Tensor = self.last(F.pad(self.bn(self.conv(x)) - border, (1, 1, 1, 1)) + border)
            return y

    model, x = settle(Padded(), 3, 8, 8), noise(4, 3, 8, 8)
    graph = fuse(model, x[:2], batch_norm).graph
    torch.testing.assert_close(graph.eval()(x), model(x), rtol=1e-5, atol=1e-5)
    assert not [n for n in graph.graph.nodes if n.op == "call_module" and n.target == "bn"]
    graph(x).square().sum().backward()
    (shift,) = [one for name, one in graph.named_parameters() if name.endswith("bn.bias")]
    model(x).square().sum().backward()
    assert shift.grad is not None and model.bn.bias.grad is not None  # type: ignore[union-attr]
    torch.testing.assert_close(shift.grad, model.bn.bias.grad, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]
