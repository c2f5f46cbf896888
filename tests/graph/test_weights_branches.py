"""Checks that parallel branches become one quantized convolution, and that all of them are trained."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from branched_nets import BLOCKS, Branches, branched, conv_norm
from captures import Calls
from chain import noise, run_ort, run_torch, settle
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import ModelConfig, ScheduleConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.fuse import fuse
from qatkit.graph.phase import set_phase
from qatkit.graph.quantizers import quantized_operators
from qatkit.graph.scales.align import align
from qatkit.models import build
from qatkit.train.module import QATModule

IMAGES = noise(16, 3, 32, 32)
MERGED = ("one.conv2d", "two.conv2d", "three.conv2d")
BRANCHED = [name for name in BLOCKS if name != "computed kernel"]


def quantized(model: nn.Module, images: Tensor, **schedule: Any) -> QATModule:
    """Returns a calibrated module with fake quantization enabled."""
    module = QATModule(model, images[:2], ScheduleConfig(**schedule))
    module.calibrate([images])
    set_phase(module.graph, observe=False, quantize=True)
    return module


def train(module: QATModule, images: Tensor, steps: int = 3) -> None:
    module.graph.train()
    optimizer = torch.optim.SGD([p for p in module.graph.parameters() if p.requires_grad], 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(module.graph(images), torch.arange(len(images)) % 10).backward()
        optimizer.step()
    align(module.graph)


def convolutions(module: QATModule) -> list[str]:
    return [str(node.target) for node, _, _ in quantized_operators(module.graph)]


@pytest.mark.parametrize(
    ("name", "batch_norm"),
    [*((name, "fold") for name in BRANCHED), ("cached kernel", "freeze"), ("all branches", "train")],
)
def test_every_branch_trains_and_is_merged(name: str, batch_norm: str) -> None:
    module = quantized(branched(name), IMAGES, batch_norm=batch_norm)
    assert convolutions(module)[:4] == ["stem.0", *MERGED]
    before = {path: one.detach().clone() for path, one in module.graph.named_parameters()}
    train(module, IMAGES)
    windows = {one.shape[2:] for path, one in before.items() if path.startswith("two.") and one.ndim == 4}
    assert windows == {(1, 1), (3, 3)}
    for path, one in module.graph.named_parameters():
        assert one.grad is not None and one.grad.abs().max() > 0, path
        assert not torch.equal(one, before[path]), path


def test_gradients_are_those_of_the_model() -> None:
    """Gradient norms are those of the model's training path, with BatchNorms in inference mode."""
    model = branched("frozen parameters")
    graph = fuse(model, IMAGES[:2], "freeze").graph.train()
    for module in model.modules():
        module.training = isinstance(module, Branches)
    for one in (model, graph):
        F.cross_entropy(one(IMAGES), torch.arange(16) % 10).backward()
    wanted = sorted(p.grad.norm().item() for p in model.parameters() if p.grad is not None)
    found = sorted(p.grad.norm().item() for p in graph.parameters() if p.grad is not None)
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    "name", ["cached kernel", "chain", pytest.param("all branches", marks=pytest.mark.slow)]
)
def test_the_trained_file_agrees_with_the_module(name: str, tmp_path: Any) -> None:
    module = quantized(branched(name), IMAGES)
    train(module, IMAGES)
    converted = module.convert().graph
    export_onnx(converted, IMAGES[:2], tmp_path / "model.onnx")
    found = run_ort(tmp_path / "model.onnx", IMAGES)
    np.testing.assert_allclose(found, run_torch(converted, IMAGES), rtol=0, atol=2e-6)
    stored = [one for one in onnx.load(tmp_path / "model.onnx").graph.initializer if len(one.dims) == 4]
    assert [one.data_type for one in stored] == [onnx.TensorProto.INT8] * 4


@pytest.mark.parametrize("batch_norm", ["fold", "freeze"])
def test_merged_weights_train_alone_where_asked(batch_norm: str) -> None:
    model = branched("cached kernel")
    module = QATModule(model, IMAGES[:2], ScheduleConfig(batch_norm=batch_norm, branches="merged"))
    assert convolutions(module)[:4] == ["stem.0", *MERGED]
    block: Any = model.three
    for name, wanted in zip(("weight", "bias"), block.merged(), strict=True):
        found = module.graph.get_parameter(f"three.conv2d.{name}")
        assert found.requires_grad
        torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
    assert not [n for n, _ in module.graph.named_parameters() if "wide" in n or "skip" in n]


def test_without_training_merged_weights_are_plain() -> None:
    module = QATModule(branched("chain"), IMAGES[:2], ScheduleConfig(epochs=0))
    assert {"two.conv2d.weight", "two.conv2d.bias"} == {
        name for name, _ in module.graph.named_parameters() if name.startswith("two")
    }


def test_merged_weights_are_float32_under_autocast() -> None:
    graph = fuse(branched("chain"), IMAGES[:2]).graph
    conv = graph.get_submodule("two.conv2d")
    wanted = conv.weight
    with torch.autocast("cpu", torch.bfloat16):
        found = conv.weight
    assert isinstance(found, Tensor) and isinstance(wanted, Tensor)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_statistics_that_stay_are_noted() -> None:
    notes = QATModule(branched("all branches"), IMAGES[:2], ScheduleConfig(batch_norm="train")).notes
    assert [name for name, reason in notes if "keep their statistics" in reason] == ["schedule.batch_norm"]


def sums(*names: str) -> Callable[..., Tensor]:
    """Returns a forward that sums the outputs of these modules for one input; "" stands for the input."""

    def forward(self: Any, x: Tensor) -> Tensor:
        given: Tensor = self.first(x).relu()
        parts = [getattr(self, name)(given) if name else given for name in names]
        y = parts[0]
        for part in parts[1:]:
            y = y + part
        result: Tensor = self.last(y.relu()) if hasattr(self, "last") else y
        return result

    return forward


def net(forward: Callable[..., Tensor], rank: int = 2, **modules: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](3, 4, 3)
    return settle(Calls(forward, first=first, **modules), 3, *[10] * rank)


# Sums that become one convolution: their rank, their modules, and the kernel size of the convolution.
MERGING: dict[str, tuple[int, dict[str, nn.Module], tuple[int, ...]]] = {
    "rows and columns": (
        2,
        {
            "square": nn.Conv2d(4, 6, 3, padding=1),
            "row": nn.Conv2d(4, 6, (1, 3), padding=(0, 1)),
            "column": nn.Conv2d(4, 6, (3, 1), padding=(1, 0)),
        },
        (3, 3),
    ),
    "dilated, depthwise": (
        2,
        {
            "wide": conv_norm(4, 4, 7, groups=4),
            "thin": nn.Conv2d(4, 4, 3, padding=3, dilation=3, groups=4),
            "skip": nn.BatchNorm2d(4),
        },
        (7, 7),
    ),
    "strides": (
        2,
        {"wide": nn.Conv2d(4, 4, 5, 2, 2, groups=2), "point": nn.Conv2d(4, 4, 1, 2, groups=2)},
        (5, 5),
    ),
    "a row of values": (1, {"wide": nn.Conv1d(4, 5, 3, padding="same"), "point": nn.Conv1d(4, 5, 1)}, (3,)),
    "volumes": (3, {"wide": nn.Conv3d(4, 4, 3, padding=1), "point": nn.Conv3d(4, 4, 1)}, (3, 3, 3)),
    "depthwise and dense": (
        2,
        {"a": nn.Conv2d(4, 4, 3, padding=1, groups=4), "b": nn.Conv2d(4, 4, 3, padding=1)},
        (3, 3),
    ),
    "a bottleneck beside": (
        2,
        {
            "wide": nn.Conv2d(4, 6, 3, padding=1),
            "narrow": nn.Sequential(nn.Conv2d(4, 2, 1, bias=False), nn.Conv2d(2, 6, 3, padding=1)),
        },
        (3, 3),
    ),
    "strides in a chain": (
        2,
        {
            "wide": nn.Conv2d(4, 4, 4, 4),
            "chain": nn.Sequential(nn.Conv2d(4, 4, 2, 2), nn.Conv2d(4, 4, 2, 2)),
        },
        (4, 4),
    ),
}


@pytest.mark.parametrize("batch_norm", ["fold", "freeze"])
@pytest.mark.parametrize("name", MERGING)
def test_sums_of_convolutions_are_one(name: str, batch_norm: str) -> None:
    rank, modules, size = MERGING[name]
    model = net(sums(*modules), rank, **modules)
    x = noise(3, 3, *[14] * rank)
    graph = fuse(model, x, batch_norm, depthwise=True).graph.eval()
    called = [graph.get_submodule(str(n.target)) for n in graph.graph.nodes if n.op == "call_module"]
    assert len(called) == 2 and called[1].kernel_size == size
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


# Sums that stay: the forward, its modules, and the number of modules that the graph still calls.
APART: dict[str, tuple[Callable[..., Tensor], dict[str, nn.Module], int]] = {
    "a residual stream": (sums("conv", ""), {"conv": nn.Conv2d(4, 4, 3, padding=1)}, 2),
    "what a merged one costs": (
        sums("separable", "point"),
        {
            "separable": nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 8, 1)),
            "point": nn.Conv2d(4, 8, 1),
        },
        4,
    ),
    "zeros that a bias has changed": (
        sums("chain", "wide"),
        {
            "chain": nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)),
            "wide": nn.Conv2d(4, 4, 3, padding=1),
        },
        4,
    ),
    "an activation between": (
        sums("chain", "wide"),
        {
            "chain": nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)),
            "wide": nn.Conv2d(4, 4, 3, padding=1),
        },
        5,
    ),
}


@pytest.mark.parametrize("name", APART)
def test_other_sums_stay(name: str) -> None:
    forward, modules, calls = APART[name]
    model = net(forward, 2, **modules)
    x = noise(3, 3, 12, 12)
    graph = fuse(model, x).graph.eval()
    assert len([n for n in graph.graph.nodes if n.op == "call_module"]) == calls
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_norm_behind_the_sum_allows_the_input_in_it() -> None:
    """RepViT has blocks where a BatchNorm follows a sum of convolutions and their input."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y: Tensor = self.norm(self.wide(x) + self.point(x) + x)
        return y

    wide, point = conv_norm(4, 4, 3, groups=4), nn.Conv2d(4, 4, 1, groups=4)
    model = net(forward, wide=wide, point=point, norm=nn.BatchNorm2d(4))
    x = noise(3, 3, 12, 12)
    graph = fuse(model, x, depthwise=True).graph.eval()
    assert len([n for n in graph.graph.nodes if n.op == "call_module"]) == 2
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


class Sum(nn.Module):
    """A sum in a module without parameters."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other


@pytest.mark.parametrize("branches", ["train", "merged"])
def test_a_module_may_add_them_up(branches: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y: Tensor = self.sum(self.wide(x), self.point(x))
        return y

    model = net(forward, sum=Sum(), wide=conv_norm(4, 4, 3), point=conv_norm(4, 4, 1))
    x = noise(3, 3, 12, 12)
    graph = fuse(model, x, branches=branches).graph.eval()
    assert len([n for n in graph.graph.nodes if n.op == "call_module"]) == 2
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_weight_that_others_read_stays_tied() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y: Tensor = (self.wide(x) + self.point(x)).relu()
        return F.conv2d(y, self.point[0].weight)

    model = net(forward, wide=conv_norm(4, 4, 3), point=conv_norm(4, 4, 1))
    graph = fuse(model, noise(3, 3, 12, 12)).graph
    read = {id(one) for one in graph.parameters() if one.shape == (4, 4, 1, 1)}
    assert len(read) == 1


def test_a_block_that_serves_twice_keeps_one_weight() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.block(self.block(self.first(x)))
        return y

    model = net(forward, block=BLOCKS["cached kernel"](4, 4))
    x = noise(3, 3, 12, 12)
    module = QATModule(model, x)
    torch.testing.assert_close(fuse(model, x).graph.eval()(x), model(x), rtol=1e-5, atol=1e-5)
    quantized = quantized_operators(module.graph)
    assert len(quantized) == 3
    names = [n for n, _ in module.graph.named_parameters() if n.startswith("block")]
    assert len(names) == len({id(module.graph.get_parameter(n)) for n in names})


class Bordered(nn.Module):
    """A block that pads with its first bias, as in ECBSR, so that it cannot be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3)
        self.deployed = nn.Conv2d(4, 4, 3, padding=1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.first.bias is not None
        bias = self.first.bias.view(1, -1, 1, 1)
        if self.training:
            y: Tensor = self.second(F.pad(self.first(x) - bias, (1, 1, 1, 1)) + bias)
            return y
        kernel = torch.einsum("omhw,mi->oihw", self.second.weight, self.first.weight[:, :, 0, 0])
        self.deployed.weight.data = kernel.detach()
        inner = torch.einsum("omhw,m->o", self.second.weight, self.first.bias)
        assert self.second.bias is not None and self.deployed.bias is not None
        self.deployed.bias.data = (inner + self.second.bias).detach()
        result: Tensor = self.deployed(x)
        return result


def test_a_block_that_is_not_merged_trains_and_is_noted() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.block(self.first(x))
        return y

    model, x = net(forward, block=Bordered()), noise(3, 3, 12, 12)
    module = QATModule(model, x)
    assert [name for name, reason in module.notes if "qatkit cannot merge them" in reason] == ["block"]
    assert {"block.first.weight", "block.second.weight"} <= {n for n, _ in module.graph.named_parameters()}


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "convs"), [("repvgg_a0", 22), ("mobileone_s0", 43)])
def test_models_of_timm_have_one_convolution_a_block(name: str, convs: int) -> None:
    torch.manual_seed(0)
    model = settle(build(ModelConfig(f"timm/{name}"), num_classes=10), 3, 32, 32)
    module = quantized(model, IMAGES[:4])
    train(module, IMAGES[:4], 1)
    assert len(convolutions(module)) == convs + 1
    assert all(p.grad is not None for p in module.graph.parameters() if p.requires_grad)
