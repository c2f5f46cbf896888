"""Checks that unchanged weights share the float model's memory, and that the float model never changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from chain import noise
from torch import Tensor, nn

from qatkit.algorithms import GPTQ, Algorithm, BiasCorrection, Equalize
from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.captured import Captured
from qatkit.train.module import QATModule

X = noise(16, 256)


class Wide(nn.Sequential):
    """Three Linears, the first two of which are large."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 4))


def prepared(model: nn.Module, algorithms: Sequence[Algorithm] = (), epochs: int = 0) -> QATModule:
    module = QATModule(Captured(model, X[:2]), X[:2], ScheduleConfig(epochs=epochs), algorithms=algorithms)
    module.calibrate([X])
    module.correct([X])
    return module


def places(module: nn.Module) -> set[int]:
    return {one.data_ptr() for one in module.parameters()}


CASES: dict[str, tuple[Sequence[Algorithm], int, bool]] = {
    "nothing": ((), 0, True),
    "gptq": ((GPTQ(images=16),), 0, True),
    "biases": ((BiasCorrection(images=16),), 0, True),
    "weights": ((Equalize(), GPTQ(images=16)), 0, False),
    "training": ((), 1, False),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_shared_where_nothing_changes_them(case: str) -> None:
    algorithms, epochs, shared = CASES[case]
    model = Wide()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    module = prepared(model, algorithms, epochs)
    assert len(places(model) & places(module)) == 2 * shared
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_other_weights_are_loaded_beside_the_float_model() -> None:
    model, x = Wide().eval(), X[:3]
    module, other = prepared(model), prepared(model)
    state = module.state_dict()
    other.load_state_dict(state)
    assert places(model) & places(other)  # equal weights stay shared
    state["graph.0.weight"] = state["graph.0.weight"] + 1
    before = _outputs(model, x)
    other.load_state_dict(state)
    assert torch.equal(_outputs(model, x), before)
    assert not torch.equal(_outputs(other.eval(), x), _outputs(module.eval(), x))


def test_a_converted_module_outlives_the_weights() -> None:
    """Later changes of the prepared module's weights do not affect the converted one, nor its float layer."""
    module = QATModule(Wide(), X[:2], overrides={"2": OverrideConfig(float=True)})
    module.calibrate([X])
    converted = module.convert().graph
    before = _outputs(converted, X)
    with torch.no_grad():
        for one in module.parameters():
            one.zero_()
    assert torch.equal(_outputs(converted, X), before)


@torch.no_grad()
def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found
