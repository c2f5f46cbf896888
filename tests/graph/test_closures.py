"""Tests of hooks that refer to their model.

Hooks of a copy store activations in that copy, and the captured graph does what the hooks do.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from captures import noise_of, results, same
from torch import Tensor, nn

from qatkit.graph.phase import set_phase
from qatkit.graph.proof import prove
from qatkit.graph.trace import copy_of
from qatkit.train.module import QATModule


class Taps(nn.Module):
    """A body whose hooks store activations, and a head that reads them.

    Args:
        hooks: registers the hooks, and returns a function that returns the stored activations.
    """

    def __init__(self, hooks: Callable[[Any], Callable[[], list[Tensor]]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)
        self.kept = hooks(self)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        self.body(x)
        kept = self.kept()
        result: Tensor = self.head(kept[0] + 2 * kept[1])
        return result, kept


def closure_over_the_model(self: Any) -> Callable[[], list[Tensor]]:
    self.features = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.features[name] = output

        return hook

    for place in (0, 3):
        self.body[place].register_forward_hook(keep(str(place)))
    return lambda: list(self.features.values())


def storage_outside(self: Any) -> Callable[[], list[Tensor]]:
    kept: dict[str, Tensor] = {}
    self.body[1].register_forward_hook(lambda _, __, y: kept.__setitem__("one", y))
    self.body[2].register_forward_pre_hook(lambda _, x: kept.__setitem__("two", x[0] + 1))
    return lambda: list(kept.values())


def default_argument(self: Any) -> Callable[[], list[Tensor]]:
    self.features = [torch.zeros(0), torch.zeros(0)]

    def hook(_: nn.Module, __: Any, y: Tensor, *, model: Any = self, place: int = 0) -> None:
        model.features[place] = y

    self.body[0].register_forward_hook(hook)
    self.body[3].register_forward_hook(functools.partial(hook, place=1))
    return lambda model=self: model.features  # type: ignore[misc]


def weak_reference(self: Any) -> Callable[[], list[Tensor]]:
    self.features, reference = {}, weakref.ref(self)

    def hook(module: nn.Module, inputs: Any, keywords: Any, output: Tensor) -> None:
        reference().features[id(module)] = output  # type: ignore[union-attr]

    for place in (0, 3):
        self.body[place].register_forward_hook(hook, with_kwargs=True)
    return lambda: list(reference().features.values())[-2:]  # type: ignore[union-attr]


def extractor(self: Any) -> Callable[[], list[Tensor]]:
    """Registers bound methods of an object that refers to the model, as hooks."""

    class Extractor:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.found = model, dict[str, list[Tensor]]()

        def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.found.setdefault("all", []).append(output)

    held = Extractor(self)
    self.body[0].register_forward_hook(held.hook)
    self.body[2].register_forward_hook(held.hook)
    return lambda: held.found["all"][-2:]


def counter(self: Any) -> Callable[[], list[Tensor]]:
    """Registers a hook that shares a variable with the returned function."""
    last = [noise_of(1, 6)]
    first: Tensor | None = None

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        nonlocal first
        first = output
        last[0] = output * 2
        return output + 1

    self.body[2].register_forward_hook(hook)
    return lambda: [first, *last]  # type: ignore[list-item]


def replaced_forward(self: Any) -> Callable[[], list[Tensor]]:
    """Replaces the forward of one module, as adapters and profilers do."""
    self.features = []
    inner = self.body[2].forward

    def forward(x: Tensor) -> Tensor:
        self.features[:] = [x, inner(x)]
        result: Tensor = self.features[1]
        return result

    self.body[2].forward = forward
    return lambda: self.features


HOOKS = [
    closure_over_the_model,
    storage_outside,
    default_argument,
    weak_reference,
    extractor,
    counter,
    replaced_forward,
]


@pytest.mark.parametrize("hooks", HOOKS, ids=lambda one: str(one.__name__))
def test_hooks_of_copies_keep_in_the_copy(hooks: Callable[..., Any]) -> None:
    model, x = Taps(hooks).eval(), noise_of(2, 4, 6)
    before = model(x)[1]  # with gradients, as after training
    values = [one.detach().clone() for one in before]

    copied, y = copy_of(model), noise_of(3, 4, 6, seed=1)
    fresh = Taps(hooks).eval()
    for found, expected in zip(results(copied, y), results(fresh, y), strict=True):
        torch.testing.assert_close(found, expected)
    prove(model, same(model, x), x)
    for kept, one, value in zip(model.kept(), before, values, strict=True):
        assert kept is one
        torch.testing.assert_close(one, value)


class Hooks:
    """Stores features as timm does: the hooks are partials of a method, and each device has its own dict."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.found: dict[Any, dict[int, Tensor]] = defaultdict(OrderedDict)
        for i, module in enumerate(modules):
            module.register_forward_hook(functools.partial(self.collect, i))

    def collect(self, place: int, *given: Any) -> None:
        self.found[given[-1].device][place] = given[-1]

    def take(self, device: torch.device) -> dict[int, Tensor]:
        found = self.found[device]
        self.found[device] = OrderedDict()
        return found


class Features(nn.Module):
    """A backbone whose features are its outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU())
        self.hooks = Hooks([self.body[1], self.body[3]])

    def forward(self, x: Tensor) -> list[Tensor]:
        self.body(x)
        return list(self.hooks.take(x.device).values())


def test_a_backbone_with_hooks_yields_its_features() -> None:
    model, x = Features().eval(), noise_of(2, 3, 8, 8)
    model.body(x)  # the stored features have gradients
    kept = dict(model.hooks.found[x.device])
    module = QATModule(model, x).eval()
    assert module.graph.meta["outputs"] == ("output_0", "output_1")
    set_phase(module.graph, observe=False, quantize=False)
    y = noise_of(3, 3, 8, 8, seed=1)
    for found, expected in zip(module(y), results(Features().eval(), y), strict=True):
        torch.testing.assert_close(found, expected)
    assert all(kept[place] is model.hooks.found[x.device][place] for place in kept)


def test_functions_without_state_are_shared() -> None:
    def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: function(function(x))

    model: Any = nn.Linear(2, 2)
    model.activation, model.plain = twice(torch.relu), types.FunctionType.__call__
    copied: Any = copy_of(model)
    assert copied.activation is model.activation and copied.plain is model.plain
