"""Tests of capturing whole models: inputs, outputs, dtypes and copies; model and torch stay unchanged."""

from __future__ import annotations

import copy
import io
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from captures import Calls, noise_of, results, same
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.graph.proof import prove
from qatkit.graph.trace import trace
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError


class Pair(NamedTuple):
    """Two outputs."""

    left: Tensor
    right: Tensor


@dataclass
class Found:
    """Outputs as a dataclass."""

    logits: Tensor
    maps: list[Tensor]
    loss: Tensor | None = None


OUTPUTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "tensor": (lambda x: x, ("output",)),
    "tuple": (lambda x: (x, x + 1), ("output_0", "output_1")),
    "list of one": (lambda x: [x], ("output",)),
    "named tuple": (lambda x: Pair(x, x + 1), ("left", "right")),
    "dict": (lambda x: {"b": x, "a": [x + 1, x + 2]}, ("b", "a_0", "a_1")),
    "dataclass": (lambda x: Found(x, [x + 1]), ("logits", "maps_0")),
    "the same twice": (lambda x: (x, x), ("output_0", "output_1")),
    "with a number": (lambda x: (x, 3, None), ("output",)),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_form(kind: str) -> None:
    function, names = OUTPUTS[kind]

    def forward(self: Any, x: Any) -> Any:
        return function(self.fc(x))

    graph = same(Calls(forward, fc=nn.Linear(6, 6)), noise_of(2, 6))
    assert graph.meta["outputs"] == names


class Ids(nn.Module):
    """A model of token ids with an optional mask and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(9, 6), nn.Linear(6, 2)

    def forward(self, ids: Tensor, mask: Tensor | None = None, *, scale: bool = False) -> Tensor:
        x = self.words(ids)
        if mask is not None:
            x = x * mask[..., None].type_as(x)
        y: Tensor = self.fc(x.sum(1) / (ids.shape[1] if scale else 1))
        return y


@pytest.mark.parametrize("named", [{}, {"mask": torch.ones(2, 5, dtype=torch.int64).tril()}, {"scale": True}])
def test_integer_inputs_and_keywords(named: dict[str, Any]) -> None:
    ids = torch.arange(10).reshape(2, 5) % 9
    graph = same(Ids(), {"ids": ids, **named})
    assert graph.meta["inputs"] == ("ids", *[name for name in named if name == "mask"])


def build() -> Any:
    """Returns a model of several kinds of modules, one of which is in inference mode."""

    def forward(self: Any, x: Any) -> Any:
        x = self.act(self.norm(self.conv(x)))
        x = x * self.scale + torch.arange(x.shape[-1])
        y: Tensor = self.fc(x.mean((2, 3)))
        return y

    torch.manual_seed(0)
    model: Any = Calls(
        forward,
        conv=nn.Conv2d(3, 4, 3),
        norm=nn.BatchNorm2d(4),
        act=nn.ReLU(inplace=True),
        fc=nn.Linear(4, 2),
        scale=nn.Parameter(torch.rand(4, 1, 1)),
    )
    model.norm.eval()
    return model


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_untouched(training: bool) -> None:
    model, x = build().train(training), noise_of(2, 3, 8, 8)
    model.get_submodule("norm").eval()
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    given, call, modules = x.clone(), nn.Module.__call__, [id(m) for m in model.modules()]
    graph = trace(model, x)
    assert graph.training is training
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [id(m) for m in model.modules()] == modules
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(x, given)
    assert nn.Module.__call__ is call
    assert not {id(p) for p in graph.parameters()} & {id(p) for p in model.parameters()}


@pytest.mark.parametrize("error", [ValueError("no such thing"), KeyError("x"), AttributeError("self.y")])
def test_a_model_error_is_one_line_and_leaves_no_patches_behind(error: Exception) -> None:
    def forward(self: Any, x: Any) -> Any:
        raise error

    call, scripted, enter = (
        nn.Module.__call__,
        torch.jit.ScriptFunction.__call__,
        torch.inference_mode.__enter__,
    )
    with pytest.raises(ConfigError, match=type(error).__name__) as caught:
        trace(Calls(forward, fc=nn.Linear(1, 1)), noise_of(2, 3))
    assert "\n" not in str(caught.value)
    assert nn.Module.__call__ is call
    assert torch.jit.ScriptFunction.__call__ is scripted
    assert torch.inference_mode.__enter__ is enter
    assert not torch.overrides._get_current_function_mode_stack()


def test_copies_and_pickles_of_the_graph() -> None:
    x = noise_of(2, 3, 8, 8)
    graph = trace(build(), x).eval()
    stored = io.BytesIO()
    torch.save(graph, stored)
    stored.seek(0)
    for other in (copy.deepcopy(graph), torch.load(stored, weights_only=False)):
        assert isinstance(other, fx.GraphModule)
        assert torch.equal(other(x), graph(x))


def test_gradients_reach_all_parameters() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = x @ self.weight
        z = y.clone()
        z[:, :2] *= self.scale
        y = torch.zeros_like(z)
        y[:, 1:] = z[:, 1:]
        out: Tensor = self.fc(y)
        return out

    model = Calls(
        forward,
        fc=nn.Linear(6, 2),
        weight=nn.Parameter(noise_of(6, 6)),
        scale=nn.Parameter(torch.tensor(2.0)),
    )
    x = noise_of(2, 6)
    graph = trace(copy.deepcopy(model), x)
    graph(x).square().sum().backward()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(graph.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_in_other_types_are_quantized_in_float32(dtype: torch.dtype) -> None:
    """The graph is that of the float32 model, and takes float32 inputs."""
    model, x = build().to(dtype), noise_of(2, 3, 8, 8).to(dtype)
    module = QATModule(model, x)
    assert next(model.parameters()).dtype is dtype
    assert all(p.dtype is torch.float32 for p in module.graph.parameters())
    assert any("float32" in reason for _, reason in module.notes)
    batches = [noise_of(4, 3, 8, 8, seed=s).to(dtype) for s in range(2)]
    module.calibrate(batches)
    module.ready_to_convert()
    converted = module.convert().graph
    expected = results(copy.deepcopy(model).float(), batches[0].float())[0]
    (found,) = results(converted, batches[0].float())
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()


def test_autocast_inside_is_off_and_noted() -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.fc(x)
        return x.float() * 2

    model: Any = Calls(forward, fc=nn.Linear(6, 6))
    x = noise_of(2, 6)
    graph = trace(model, x)
    prove(model, graph, x)
    torch.testing.assert_close(graph(x), model.fc(x) * 2)
    assert any("autocast" in reason for _, reason in graph.meta["notes"])


def test_capture_under_inference_mode_and_no_grad() -> None:
    model, x = build(), noise_of(2, 3, 8, 8)
    with torch.inference_mode():
        graph = trace(model, x.clone())
    graph.train()(x).sum().backward()
    with torch.no_grad():
        same(model, x)


def test_models_on_other_threads_are_not_disturbed() -> None:
    """A model that another thread calls during the capture is not recorded, and its results stay the same."""
    other, x, found = nn.Sequential(nn.Linear(6, 6), nn.ReLU()), noise_of(2, 6), []
    expected = other(x)

    def elsewhere() -> None:
        found.append(other(x))

    def forward(self: Any, y: Any) -> Any:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        z: Tensor = self.fc(y)
        return z

    graph = trace(Calls(forward, fc=nn.Linear(6, 2)), x)
    assert len(list(graph.graph.nodes)) == 3
    assert all(torch.equal(one, expected) for one in found)
    assert found


def test_torchscript_is_refused() -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    scripted = torch.jit.script(Small())
    for model in (scripted, nn.Sequential(nn.Linear(6, 6), scripted)):
        with pytest.raises(ConfigError, match="not TorchScript"):
            trace(model, noise_of(2, 6))


def test_reserved_names_of_parameters() -> None:
    """`graph`, `code` and `meta` are attributes of GraphModule itself."""

    def forward(self: Any, x: Any) -> Any:
        y: Tensor = self.graph(x) * self.code
        return y

    same(Calls(forward, graph=nn.Linear(6, 6), code=nn.Parameter(torch.rand(6))), noise_of(2, 6))
