"""Tests of tracing: which modules stay as calls, the names of nodes, and errors for untraceable models."""

from __future__ import annotations

import inspect
import operator
from typing import Any, cast

import pytest
import torch
import torchvision
from chain import Residual, noise, settle
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.fuse import fuse
from qatkit.graph.nodes import site
from qatkit.graph.trace import propagate, trace
from qatkit_verify.errors import ConfigError


def calls(graph: fx.GraphModule, kind: type[nn.Module]) -> list[str]:
    modules = dict(graph.named_modules())
    return [
        str(n.target) for n in graph.graph.nodes if n.op == "call_module" and type(modules[n.target]) is kind
    ]


def sites(graph: fx.GraphModule) -> list[str]:
    return [site(n) for n in graph.graph.nodes if n.op not in ("output", "placeholder")]


@pytest.mark.parametrize("training", [False, True])
def test_dropout_and_stochastic_depth_stay_modules(training: bool) -> None:
    """Traced in either mode, the graph drops values in training only."""
    model = torchvision.models.efficientnet_b0(num_classes=5).train(training)
    graph = trace(model, noise(2, 3, 32, 32))
    assert graph.training is training
    paths = {k: n for n, m in model.named_modules() for k in [type(m)] if k is nn.Dropout}
    assert calls(graph, nn.Dropout) == [paths[nn.Dropout]]
    depth = torchvision.ops.StochasticDepth
    # The first block of each of the seven stages has no residual, and so no StochasticDepth call.
    assert len(calls(graph, depth)) == sum(
        isinstance(m, torchvision.models.efficientnet.MBConv) and m.use_res_connect for m in model.modules()
    )
    x = noise(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(graph.eval()(x), model.eval()(x))
        graph.eval()
        graph.get_submodule(paths[nn.Dropout]).train()
        assert not torch.equal(graph(x), graph(x))


class Named(nn.Module):
    """A model with functions, a method, a parameter and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Inner(), Inner())
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(x)
        return cast(Tensor, self.fc(self.fc(x) * self.scale).flatten(1))


class Inner(nn.Module):
    """A module with two additions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x) + x) + x


def test_sites_are_module_paths_and_the_operators_in_them() -> None:
    graph = trace(Named(), noise(2, 3, 4))
    assert sites(graph) == [
        "layer1.0.conv",
        "layer1.0.add",
        "layer1.0.relu",
        "layer1.0.add_1",
        "layer1.1.conv",
        "layer1.1.add",
        "layer1.1.relu",
        "layer1.1.add_1",
        "fc",
        "scale",
        "mul",
        "fc_1",
        "flatten",
    ]
    assert [site(n) for n in graph.graph.nodes if n.op == "placeholder"] == ["input"]


class Shadow(nn.Module):
    """A model whose first function has the name of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.relu(F.relu(x) - 1))


def test_a_module_has_first_right_to_its_own_name() -> None:
    assert sites(trace(Shadow(), noise(2, 4))) == ["relu_1", "sub", "relu"]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "densenet121", "swin_t"])
def test_sites_are_unique(name: str) -> None:
    found = sites(trace(torchvision.models.get_model(name, num_classes=2), noise(2, 3, 64, 64)))
    assert len(found) == len(set(found))


class Branching(nn.Module):
    """A model that contains a `Branch`."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), Branch())

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.block(x))


class Branch(nn.Module):
    """A module with control flow that depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line to be named
            return -x
        return x


def test_a_branch_on_data_is_refused_with_module_file_and_line() -> None:
    lines, start = inspect.getsourcelines(Branch)
    line = start + next(i for i, text in enumerate(lines) if "to be named" in text)
    with pytest.raises(ConfigError) as caught:
        trace(Branching(), noise(2, 4))
    text = str(caught.value)
    assert f"{__file__}:{line} `if x.sum() > 0:" in text
    assert "'block.1'" in text and "Branching" in text
    assert "\n" not in text


def test_assertions_on_shapes_are_dropped() -> None:
    graph = trace(torchvision.models.vit_b_16(num_classes=2, image_size=32), noise(2, 3, 32, 32))
    assert not [n for n in graph.graph.nodes if n.target is torch._assert]


def test_a_graph_is_taken_as_it_is_and_a_model_is_copied() -> None:
    model = settle(Residual(), 3, 8, 8)
    graph = trace(model, noise(2, 3, 8, 8))
    assert trace(graph, noise(2, 3, 8, 8)) is graph
    assert graph.get_parameter("conv1.weight") is not model.get_parameter("conv1.weight")
    assert torch.equal(graph(noise(1, 3, 8, 8)), model(noise(1, 3, 8, 8)))


class InPlace(nn.Module):
    """A model with in-place modules, functions, methods and operators (`+=`), whose results are used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.swish = (
            nn.Conv2d(3, 3, 1),
            nn.ReLU(inplace=True),
            nn.Hardswish(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.swish(self.relu(self.conv(x)))
        y = F.relu(self.conv(y), inplace=True)
        y += x
        y *= 1.5
        y -= 0.25
        return cast(Any, y).add_(x).mul_(2).sub_(1).relu_()  # type: ignore[no-any-return]


def test_no_in_place_operator_is_left_after_fuse() -> None:
    model, x = InPlace().eval(), noise(2, 3, 4, 4)
    expected = model(x)
    graph = fuse(model, x).graph
    modules = dict(graph.named_modules())
    for node in graph.graph.nodes:
        assert node.target not in (operator.iadd, operator.imul, operator.isub)
        assert not node.kwargs.get("inplace", False)
        assert not (node.op == "call_method" and str(node.target).endswith("_"))
        assert not (node.op == "call_module" and getattr(modules[node.target], "inplace", False))
    torch.testing.assert_close(graph(x), expected)
    assert model.relu.inplace  # the caller's model is unchanged


class Overwrites(nn.Module):
    """A model with in-place calls whose results are unused: later readers see the changed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.conv(x), self.conv(x * 2)
        before = y * 3
        y.add_(x)
        F.relu(y, inplace=True)
        self.relu(z)
        return torch.cat([before, y, y - z], 1)


def test_an_overwritten_tensor_is_read_with_its_new_values() -> None:
    model, x = Overwrites().eval(), noise(2, 3, 4, 4)
    expected = model(x)
    torch.testing.assert_close(trace(model, x)(x), expected)
    torch.testing.assert_close(fuse(model, x).graph(x), expected)


def test_propagate_leaves_shapes_but_no_data() -> None:
    graph = trace(settle(Residual(), 3, 8, 8), noise(2, 3, 8, 8)).train()
    propagate(graph, noise(2, 3, 8, 8))
    values = {site(n): n.meta["value"] for n in graph.graph.nodes}
    assert values["pool"].shape == (2, 8, 4, 4) and values["fc"].shape == (2, 5)
    assert all(v.is_meta for v in values.values() if isinstance(v, Tensor))
    assert graph.training


class OwnNorm(nn.BatchNorm2d):
    """A BatchNorm with its own forward, which ends with an activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)
        return cast(Tensor, self.act(y))


@pytest.mark.parametrize("first", [nn.Conv2d(3, 3, 1), nn.Identity()], ids=["folded", "alone"])
def test_a_batch_norm_with_a_forward_of_its_own_is_fused(first: nn.Module) -> None:
    model = nn.Sequential(first, OwnNorm(3), nn.Conv2d(3, 2, 1)).eval()
    nn.init.uniform_(model.get_buffer("1.running_var"), 0.5, 2.0)
    x = torch.randn(2, 3, 6, 6)
    result = fuse(model, x, depthwise=True)
    assert result.changed == 1 and result.skipped == []
    assert not [m for m in result.graph.modules() if isinstance(m, nn.BatchNorm2d)]
    torch.testing.assert_close(result.graph(x), model(x), rtol=0, atol=1e-5)


class Flagged(nn.Module):
    """A model whose optional arguments are not inputs of the file."""

    def forward(self, x: Tensor, mask: Tensor | None = None, double: bool = False) -> Tensor:
        if mask is not None:
            x = x + mask
        return x * 2 if double else x - 1


def test_an_argument_with_a_default_is_that_default() -> None:
    x = torch.randn(2, 3)
    graph = trace(Flagged(), x)
    assert graph.meta["inputs"] == ("input",)
    assert torch.equal(graph(x), x - 1)
