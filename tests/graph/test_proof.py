"""Checks that `prove` rejects faulty graphs, but not those that only differ from the model by rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import Calls, noise_of
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.fuse import fuse
from qatkit.graph.proof import prove
from qatkit.graph.stub import stub
from qatkit.graph.trace import trace
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError


class Block(nn.Module):
    """A residual block of a convolution, a BatchNorm and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x))) + x


class Net(nn.Module):
    """A stem, residual blocks, a minimal attention and a head."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(2).transpose(1, 2))
        x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        y: Tensor = self.head(x.mean(1))
        return y


def weight(graph: fx.GraphModule) -> None:
    graph.get_submodule("blocks.1.conv").weight.data.view(-1)[0] += 0.1  # type: ignore[operator]


def axis(graph: fx.GraphModule) -> None:
    node = next(n for n in graph.graph.nodes if n.target == "softmax")
    node.args, node.kwargs = (node.args[0], -2), {}


def epsilon(graph: fx.GraphModule) -> None:
    graph.get_submodule("norm").eps = 1e-3  # type: ignore[assignment]


def term(graph: fx.GraphModule) -> None:
    node = [n for n in graph.graph.nodes if getattr(n.target, "__name__", "") == "add"][1]
    node.replace_all_uses_with(node.args[0])
    graph.graph.erase_node(node)


def constant(graph: fx.GraphModule) -> None:
    node = next(n for n in graph.graph.nodes if n.target == "mean")
    with graph.graph.inserting_after(node):
        new = graph.graph.call_function(torch.add, (node, 1e-3))
    node.replace_all_uses_with(new, lambda user: user is not new)


FAULTS: dict[Callable[[fx.GraphModule], None], str] = {
    weight: "first in module 'blocks.1.conv'",
    axis: "first in module 'head'",
    epsilon: "first in module 'norm'",
    term: "first in module 'blocks.1'",
    constant: "first in module 'head'",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_graph_is_found_and_its_module_named(fault: Callable[[fx.GraphModule], None]) -> None:
    model, x = Net(), noise_of(2, 3, 8, 8)
    graph = trace(model, x)
    prove(model, graph, x)
    fault(graph)
    graph.recompile()
    with pytest.raises(ConfigError, match=FAULTS[fault]) as caught:
        prove(model, graph, x)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", [weight_of for weight_of in FAULTS if weight_of is not weight])
def test_a_fault_behind_fuse_and_stub_is_found(fault: Callable[[fx.GraphModule], None]) -> None:
    model, x = settled(Net()), noise_of(2, 3, 8, 8)
    graph = stub(fuse(copy.deepcopy(model), x).graph, x).graph
    prove(model, graph, x)
    fault(graph)
    graph.recompile()
    with pytest.raises(ConfigError):
        prove(model, graph, x)


def settled(model: nn.Module) -> nn.Module:
    """Returns the model with random statistics and parameters in its BatchNorms."""
    for i, module in enumerate(model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            generator = torch.Generator().manual_seed(i)
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))  # type: ignore[union-attr]
            module.running_var.copy_(torch.rand(len(module.weight), generator=generator) + 0.1)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("batch_norm", ["fold", "freeze", "train"])
def test_rounding_of_a_deep_model_is_no_fault(batch_norm: str) -> None:
    """The BatchNorms of fifty blocks amplify every difference."""
    model, x = settled(Net(50)), noise_of(2, 3, 8, 8)
    graph = stub(fuse(copy.deepcopy(model), x, batch_norm).graph, x).graph
    prove(model, graph, x)


def test_rounding_of_a_chaotic_model_is_no_fault() -> None:
    """This model amplifies rounding errors until float32 results are arbitrary."""

    def forward(self: Any, x: Any) -> Any:
        x = self.norm(self.conv(x))
        for _ in range(16):
            x = torch.sin(3 * x)
        return x

    model = settled(Calls(forward, conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3)))
    x = noise_of(2, 3, 8, 8)
    graph = fuse(copy.deepcopy(model), x, "freeze").graph
    with torch.no_grad():
        gap = (graph.eval()(x) - model.eval()(x)).abs().max()
    prove(model, graph, x)
    assert gap > 1e-3


def chaotic(self: Any, x: Any) -> Any:
    """Amplifies differences about 1e10 times, so that float64 is only as accurate as float32 usually is."""
    x = self.norm(self.conv(x))
    for _ in range(30):
        x = torch.sin(3 * x)
    return x


def test_rounding_that_float64_enlarges_too_is_no_fault() -> None:
    model = settled(Calls(chaotic, conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3)))
    x = noise_of(2, 3, 8, 8)
    graph = fuse(copy.deepcopy(model), x).graph
    double, doubles = copy.deepcopy(model).double().eval(), x.double()
    with torch.no_grad():
        gap = (fuse(copy.deepcopy(double), doubles).graph(doubles) - double(doubles)).abs().max()
    assert gap > 1e-7
    prove(model, graph, x)


def test_a_model_that_changes_between_calls_is_refused() -> None:
    """The model is captured with one constant, and compared with another."""
    import itertools

    def forward(self: Any, x: Any) -> Any:
        y: Tensor = self.fc(x) * next(self.numbers)
        return y

    model = Calls(forward, fc=nn.Linear(3, 3), numbers=itertools.count(1))
    with pytest.raises(ConfigError):
        QATModule(model, noise_of(2, 3))


def test_the_model_is_as_it_was() -> None:
    """Capture undoes forward's changes to buffers and attributes, and keeps the training mode."""

    def forward(self: Any, x: Any) -> Any:
        self.calls += 1
        self.steps += 1
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y: Tensor = self.fc(x)
        return y

    model = Calls(forward, fc=nn.Linear(3, 3), calls=0)
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    model.register_buffer("mean", torch.zeros(3))
    model.train()
    before = copy.deepcopy(model.state_dict())
    QATModule(model, noise_of(2, 3))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.calls == 0
    assert model.training


def test_outputs_of_other_kinds_are_compared() -> None:
    """Integers, booleans, infinities and NaNs only equal themselves."""

    def forward(self: Any, x: Any) -> Any:
        y = self.fc(x)
        masked = y.masked_fill(y > 0, float("-inf"))
        return {"best": y.argmax(-1), "any": y > 0, "masked": masked, "nan": y.new_full((2,), float("nan"))}

    model, x = Calls(forward, fc=nn.Linear(3, 3)), noise_of(2, 3)
    graph = trace(model, x)
    prove(model, graph, x)
    end = next(n for n in graph.graph.nodes if n.op == "output")
    graph.get_submodule("fc").bias.data += torch.tensor([9.0, 0, 0])  # type: ignore[operator]
    end.args = (end.args[0][:2] + end.args[0][3:],)
    graph.recompile()
    with pytest.raises(ConfigError):
        prove(model, graph, x)
