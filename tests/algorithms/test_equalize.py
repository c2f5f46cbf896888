"""Tests of cross-layer equalization: same float function, equal ranges, better per-tensor SQNR."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
import torchvision
from chain import SMALL, build, noise, prepared, settle
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.algorithms import Equalize
from qatkit.algorithms.channel_pairs import factor
from qatkit.calibration import calibrate
from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM
from qatkit.train.module import QATModule

PER_TENSOR = {"op/conv": OverrideConfig(weight_granularity="per_tensor")}


class Separable(nn.Module):
    """Full, depthwise, grouped and 1x1 convs and Linears; everything between is positively homogeneous."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.ReLU(),
            nn.Conv2d(16, 8, 3, padding=1, groups=4, bias=False), nn.Conv2d(8, 6, 1), nn.ReLU(),
            nn.AvgPool2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(6 * 9, 12), nn.ReLU(), nn.Linear(12, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Clipped(nn.Module):
    """A conv, a ReLU6 and a conv."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.clip, self.second = nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.clip(self.first(x)))
        return result


def _opened(model: nn.Module, example: Tensor, batch_norm: str = "fold") -> fx.GraphModule:
    return stub(fuse(model, example, batch_norm, depthwise=True).graph, example).graph.eval()


def _uneven(model: nn.Module) -> nn.Module:
    """Scales the channels between consecutive layers by 0.02 to 50 and back, which keeps the function."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    with torch.no_grad():
        for i, layer in enumerate(layers[:-1]):
            steps = torch.logspace(-1.7, 1.7, layer.out_channels if isinstance(layer, nn.Conv2d) else 12)
            scale = steps[torch.randperm(len(steps), generator=torch.Generator().manual_seed(i))]
            layer.weight.mul_(scale.view(-1, *[1] * (layer.weight.ndim - 1)))
            if layer.bias is not None:
                layer.bias.mul_(scale)
            _scale_inputs(layers[i + 1], 1 / scale)
    return model


def _scale_inputs(layer: nn.Conv2d | nn.Linear, scale: Tensor) -> None:
    weight = layer.weight
    for out in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            if isinstance(layer, nn.Linear):
                weight[out, i] *= scale[i // (weight.shape[1] // len(scale))]
            else:
                first = out // (weight.shape[0] // layer.groups) * weight.shape[1]
                weight[out, i] *= scale[first + i]


@pytest.mark.parametrize("name", SMALL)
def test_the_float_function_stays(name: str) -> None:
    kind, shape = SMALL[name]
    torch.manual_seed(0)
    model = settle(kind(), *shape)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    example = noise(4, *shape)
    graph = _opened(model, example)
    Equalize()(graph, example)
    torch.testing.assert_close(graph(example), model(example), rtol=1e-5, atol=1e-5)
    for key, value in model.state_dict().items():  # the float model itself doesn't change
        assert torch.equal(value, before[key])


def test_ranges_match_across_depthwise_grouped_and_flattened_ops() -> None:
    torch.manual_seed(0)
    model = _uneven(Separable()).eval()
    example = noise(2, 3, 14, 14)
    graph = _opened(model, example)
    result = Equalize()(graph, example)
    assert (result.changed, result.skipped) == (5, [])
    torch.testing.assert_close(graph(example), model(example), rtol=1e-5, atol=1e-5)
    w = {int(n.split(".")[1]): p.detach().numpy() for n, p in graph.named_parameters() if "weight" in n}

    def outputs(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(np.abs(weight).reshape(len(weight), -1).max(1))

    # The ranges of the inputs, written out per channel; each of the 8 depthwise inputs has 2 outputs.
    depthwise_in = outputs(w[3]).reshape(8, 2).max(1)
    np.testing.assert_allclose(outputs(w[0]), depthwise_in, rtol=1e-3)
    grouped_in = np.array([np.abs(w[5][c // 4 * 2 : c // 4 * 2 + 2, c % 4]).max() for c in range(16)])
    np.testing.assert_allclose(outputs(w[3]), grouped_in, rtol=1e-3)
    np.testing.assert_allclose(outputs(w[5]), np.abs(w[6]).max((0, 2, 3)), rtol=1e-3)
    np.testing.assert_allclose(outputs(w[6]), np.abs(w[11]).reshape(12, 6, 9).max((0, 2)), rtol=1e-3)
    np.testing.assert_allclose(outputs(w[11]), np.abs(w[13]).max(0), rtol=1e-3)


def test_one_pair_by_hand() -> None:
    """Ranges (8, 1) of outputs and (2, 16) of inputs give s = (2, 1/4); all become 4 = √(8·2) = √(1·16)."""
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    values = {"0.weight": [[8.0], [-1.0]], "0.bias": [3.0, 5.0], "2.weight": [[-2.0, 16.0]]}
    model.load_state_dict({key: torch.tensor(value) for key, value in values.items()}, strict=False)
    graph = _opened(model, noise(2, 1))
    Equalize()(graph, noise(2, 1))
    assert graph.get_parameter("0.weight").flatten().tolist() == pytest.approx([4.0, -4.0])
    assert graph.get_parameter("0.bias").tolist() == pytest.approx([1.5, 20.0])
    assert graph.get_parameter("2.weight").flatten().tolist() == pytest.approx([-4.0, 4.0])


def test_a_dead_channel_is_left_alone() -> None:
    first, second = torch.tensor([1.0, 0.0, 4.0, 1e-9]), torch.tensor([4.0, 1.0, 0.0, 1.0])
    assert factor(first, second).tolist() == [0.5, 1.0, 1.0, 1.0]


def test_equalizing_uneven_channels_restores_per_tensor_sqnr() -> None:
    images = noise(32, 3, 14, 14)
    torch.manual_seed(0)
    model = _uneven(Separable()).eval()
    wanted = model(images).detach()

    def sqnr(*, equalize: bool) -> float:
        graph = _opened(model, images[:2])
        if equalize:
            Equalize()(graph, images[:2])
        graph = prepare_qat(graph, FBGEMM, images[:2], PER_TENSOR).graph.eval()
        calibrate(graph, [images])
        with torch.no_grad():
            error = graph(images) - wanted
        return float(10 * torch.log10(wanted.square().mean() / error.square().mean()))

    assert sqnr(equalize=False) < 15
    assert sqnr(equalize=True) > 28


def test_relu6_ends_a_pair_unless_it_may_become_a_relu() -> None:
    torch.manual_seed(0)
    model, example = Clipped().eval(), noise(2, 3, 12, 12)
    kept = _opened(model, example)
    result = Equalize()(kept, example)
    assert result.changed == 0
    assert result.skipped == [
        (
            "first",
            "not equalized: a ReLU6 has one bound for all channels "
            "(algorithm.equalize.relu6=relu turns it into a ReLU)",
        )
    ]
    changed = _opened(model, example)
    assert Equalize(relu6="relu")(changed, example).changed == 1
    y = changed(40 * example)
    assert not torch.allclose(y, model(40 * example), rtol=0.1)  # above 6 the function differs
    torch.testing.assert_close(y, model.second(torch.relu(model.first(40 * example))), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "batch_norm", "site", "reason"),
    [
        ("residual", "fold", "stem", "2 operators read pool"),
        ("residual", "fold", "conv2", "add (add) does not scale channel by channel"),
        (
            "residual",
            "freeze",
            "conv1",
            "the BatchNorm of conv1 is not folded (schedule.batch_norm=fold folds it)",
        ),
        ("block", "fold", "fc1", "act (gelu) does not scale channel by channel"),
        (
            "twice",
            "fold",
            "conv",
            "conv is called more than once, or something else reads its weight or bias",
        ),
    ],
)
def test_what_cannot_be_equalized_says_why(name: str, batch_norm: str, site: str, reason: str) -> None:
    kind, shape = SMALL[name]
    model, example = settle(kind(), *shape), noise(2, *shape)
    graph = _opened(model, example, batch_norm)
    assert (site, f"not equalized: {reason}") in Equalize()(graph, example).skipped
    torch.testing.assert_close(graph(example), model(example), rtol=1e-5, atol=1e-5)


class Tied(nn.Module):
    """Three Linears; `shared` says which weight or bias of the first two is used a second time, if any."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.shared = shared
        if shared == "bias of a":
            self.c.bias = self.a.bias
        elif shared == "bias of b":
            self.c.bias = self.b.bias
        with torch.no_grad():
            self.a.weight.mul_(torch.logspace(-1, 1, 6)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.b(torch.relu(self.a(x))))
        if self.shared == "weight of a":
            return F.linear(x, self.a.weight)
        return cast(Tensor, self.c(x) + self.b.bias if self.shared == "bias of b by name" else self.c(x))


@pytest.mark.parametrize(
    ("shared", "pairs"),
    [("nothing", 2), ("weight of a", 0), ("bias of a", 0), ("bias of b", 0), ("bias of b by name", 0)],
)
def test_what_another_reader_sees_stays(shared: str, pairs: int) -> None:
    torch.manual_seed(0)
    model, example = Tied(shared), noise(4, 6)
    graph = _opened(model, example)
    assert Equalize()(graph, example).changed == pairs
    torch.testing.assert_close(graph(example), model(example), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_fits_a_module_built_from_other_weights() -> None:
    """On export, the configuration determines the structure, and all values come from the checkpoint."""
    images, algorithms = noise(16, 3, 32, 32), [Equalize(relu6="relu")]
    made = QATModule(build("mobilenet_v2", 32), images[:2], ScheduleConfig(), algorithms=algorithms)
    made.calibrate([images])
    blank = torchvision.models.mobilenet_v2(num_classes=10)
    other = QATModule(blank, images[:2], ScheduleConfig(), algorithms=algorithms)
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.convert().graph(images), made.convert().graph(images))
    assert made.notes
    # Notes must not make the audit accept float operators.
    assert not {site for site, reason in made.skipped if "equalized" in reason}


def test_nothing_is_touched_by_default() -> None:
    model, images = build("mobilenet_v2", 32), noise(2, 3, 32, 32)
    plain = prepared(model, images)
    module = QATModule(model, images)
    for (name, a), (other, b) in zip(
        plain.state_dict().items(), module.graph.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(a, b)
