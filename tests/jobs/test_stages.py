"""Tests of a run's stages: which are executed or restored; how often a model is traced, proven and built."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_run import calibrate_only, sha256, tiny
from torch import Tensor, nn

from qatkit.choose.algorithms import chosen_algorithms
from qatkit.config.schema import Config, ScheduleConfig
from qatkit.graph import captured, trace
from qatkit.jobs import pipeline
from qatkit.jobs.stages import Conditional, State, begin, carry_out
from qatkit.train import module
from qatkit.train.module import QATModule


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Returns a counter: how often a model is "traced", its trace "proven" and a QATModule "built"."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        whole = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, called)

    count(trace, "capture", "traced")
    for one in (captured, module):
        count(one, "prove", "proven")
    count(QATModule, "__init__", "built")
    return counts


def counts_of(config: Config, counted: Counter[str]) -> tuple[int, int, int]:
    counted.clear()
    assert pipeline.train(config) == 0
    return counted["traced"], counted["proven"], counted["built"]


def test_a_run_traces_proves_and_builds_once(tmp_path: Path, counted: Counter[str]) -> None:
    config = calibrate_only(tmp_path / "run")
    assert counts_of(config, counted) == (1, 1, 1)
    resumed = replace(config, resume=str(tmp_path / "run" / "last.ckpt"))
    assert counts_of(resumed, counted) == (1, 1, 1)


def test_a_control_is_one_more_module_of_the_same_graph(tmp_path: Path, counted: Counter[str]) -> None:
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=1, lr=1e-3))
    config.verify = replace(config.verify, control=True, max_drop=None)
    assert counts_of(config, counted) == (1, 1, 2)


def test_a_trained_float_model_keeps_its_graph(tmp_path: Path, counted: Counter[str]) -> None:
    """Checks that trained weights go into a second module, since fused weights cannot be replaced later."""
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=0, float_epochs=1))
    config.verify.max_drop = None
    assert counts_of(config, counted) == (1, 1, 2)


class Tempered(nn.Module):
    """A network that reads a value that training changes: the running mean of its BatchNorm."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        temperature = 1.0 + float(self.norm.running_mean.abs().sum())  # type: ignore[union-attr]
        x = torch.relu(self.norm(self.conv(x)))
        return cast(Tensor, self.fc(x.mean((2, 3)))) * temperature


def test_a_graph_with_a_model_value_is_retraced_after_training(tmp_path: Path, counted: Counter[str]) -> None:
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=0, float_epochs=1))
    config.model.name = f"{__name__}.Tempered"
    config.verify.max_drop = None
    assert counts_of(config, counted) == (2, 2, 2)


class Hooked(QATModule):
    """A module with its own `fuse` hook."""

    def fuse(self, model: nn.Module) -> Any:
        assert hasattr(model, "conv1") and not hasattr(model, "graph"), "the model itself, no graph of it"
        return super().fuse(model)


def test_a_fuse_hook_is_given_the_model_itself(tmp_path: Path) -> None:
    assert pipeline.train(calibrate_only(tmp_path / "mine"), Hooked) == 0
    assert pipeline.train(calibrate_only(tmp_path / "plain")) == 0
    one, other = (tmp_path / name / "model.int8.onnx" for name in ("mine", "plain"))
    assert sha256(one) == sha256(other)


def test_copies_of_a_capture_follow_weights_and_match_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    ).eval()
    images = torch.randn(2, 3, 8, 8)
    shared = captured.Captured(model, images)
    QATModule(shared, images)
    with torch.no_grad():
        for tensor in (*model.parameters(), cast(Tensor, model[1].running_mean)):
            tensor.add_(torch.randn_like(tensor))
    shared.trained()
    found, wanted = QATModule(shared, images), QATModule(model, images)
    states = found.state_dict(), wanted.state_dict()
    assert [*states[0]] == [*states[1]]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in wanted.named_parameters()]
    with torch.no_grad():
        found.graph.get_parameter("0.weight").zero_()
    assert cast(Tensor, model[0].weight).any()


def test_what_is_done_is_restored(tmp_path: Path) -> None:
    """Checks that a stage that is done does not run, and that no stage runs after one that sets a status."""
    seen: list[str] = []

    class Noted(Conditional):
        def __init__(self, name: str, *, done: bool = False, status: int | None = None) -> None:
            self.name, self.is_done, self.status = name, done, status

        def done(self, state: State) -> bool:
            return self.is_done

        def run(self, state: State) -> State:
            seen.append(self.name)
            return replace(state, status=self.status)

    stages = [Noted("first"), Noted("restored", done=True), Noted("last", status=1), Noted("never")]
    state = state_of(tmp_path)
    assert carry_out(stages, state) == 1
    assert seen == ["first", "last"] and state.status is None


def state_of(folder: Path) -> State:
    with pipeline.begun(calibrate_only(folder / "run")) as (run, data, model):
        return begin(run, data, model, QATModule)


def test_what_was_chosen_is_read_from_the_checkpoint_alone(tmp_path: Path) -> None:
    config = replace(calibrate_only(tmp_path / "run"), algorithm_choice="auto")
    assert chosen_algorithms(config, None) == []
    assert chosen_algorithms(config, {"algorithms": ["equalize"]}) == ["equalize"]
