"""Tests of trainer.compile: each QAT phase is one graph without breaks that computes what eager mode does.

A compiler adds and multiplies in another order, so values differ in their last bits. Two cases amplify this:
a value on the boundary between two integers, and a value at an end of the range, where its gradient is cut
off or not. The tests check that integers differ nowhere else and that gradients agree where neither case
occurs. Compiling takes minutes and needs a C++ compiler; whether a step can be read as one graph is tested
without one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chain import noise, settle
from tiny_run import Net
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torchvision.models.vision_transformer import VisionTransformer

from qatkit.config.schema import ScheduleConfig
from qatkit.graph.nodes import module_of
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.run.loop.compiled import compiled
from qatkit.train.distillation import tapped
from qatkit.train.learner import make_optimizer
from qatkit.train.module import QATModule

KINDS = {"plain": Quantizers(), "lsq": Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)}
NEAR = 1e-4  # in steps: float32 sums of a few hundred products in another order
IMAGES, LABELS = noise(32, 3, 8, 8, seed=3), torch.arange(32) % 10
OTHERS = 1.1 * noise(64, 3, 8, 8, seed=1)  # no value of IMAGES is at an end of their ranges


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return settle(Net(), 3, 8, 8)


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = VisionTransformer(8, 4, 2, 2, 32, 64, num_classes=10)
    nn.init.normal_(model.get_parameter("heads.head.weight"))  # torchvision's zeros leave nothing to train
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {"cnn": (cnn, "train"), "vit": (vit, "fold")}


def module_of_kind(model: str, kind: str) -> QATModule:
    build, batch_norm = MODELS[model]
    schedule = ScheduleConfig(batch_norm=batch_norm, freeze_batch_norm=1.0, lr=1e-3)
    module = QATModule(build(), IMAGES[:2], schedule, quantizers=KINDS[kind])
    module.calibrate([OTHERS])
    module.begin()
    module.train()
    return module


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


_CHECK = """
from qatkit.jobs.checks import check_machine
from qatkit.config.schema import Config, TrainerConfig
check_machine(Config(trainer=TrainerConfig(accelerator="cpu", compile=True)))
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "No working C++ compiler found"),
        pytest.param(
            '#!/bin/sh\n[ "$1" = --version ] && exec echo "g++ 12"\n'
            'echo "a.cpp:1: fatal error: Python.h: not there" >&2\nexit 1\n',
            "fatal error: Python.h: not there",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["none", "one without headers"],
)
def test_compiling_without_a_compiler_is_refused_at_the_start(
    script: str | None, said: str, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    if script is not None:
        compiler.write_text(script)
        compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", _CHECK]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert "trainer.compile=true: torch.compile failed (" in last and "trainer.compile=false" in last
    assert said in last


_OTHER_PAIRS = (("cnn", "lsq"), ("vit", "plain"), ("cnn", "plain"))


# First observing, then with fixed ranges.
@pytest.mark.parametrize("progress", [0.1, pytest.param(0.6, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model", "kind"),
    [("vit", "lsq"), *(pytest.param(*one, marks=pytest.mark.slow) for one in _OTHER_PAIRS)],
)
def test_a_step_is_read_as_one_graph(model: str, kind: str, progress: float) -> None:
    module = module_of_kind(model, kind)
    module.set_phase(progress)
    read = torch.compile(module.graph, backend="eager", fullgraph=True, dynamic=False)
    F.cross_entropy(read(IMAGES), LABELS).backward()  # with fullgraph, a graph break is an error


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_phase_is_one_graph_without_breaks(model: str, kind: str) -> None:
    module = module_of_kind(model, kind)
    optimizer = make_optimizer(module.graph, module.schedule, 1e-3)
    with compiled(module.graph, True) as found:
        for progress, phases in ((0.1, 1), (0.6, 2)):  # observing, then with fixed ranges
            for step in range(4):
                module.set_phase(progress + step / 100)
                optimizer.zero_grad()
                F.cross_entropy(module.graph(IMAGES + step), LABELS).backward()
                optimizer.step()
            assert counters["stats"]["unique_graphs"] <= phases
    assert found.breaks == 0
    assert found.graphs == (2 if kind == "plain" else 1)  # learned scales have only one phase


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_step_that_learns_features_is_compiled_too() -> None:
    """Checks feature distillation, which needs a graph with more outputs."""
    model, teacher = cnn(), settle(Net(), 3, 8, 8, seed=7)
    schedule = ScheduleConfig(distill_features=["bn2"], distill_teacher="another")
    losses = []
    for wanted in (False, True):
        module = QATModule(model, IMAGES[:2], schedule)
        module.learn_from(model, teacher)
        module.calibrate([OTHERS])
        module.train()
        module.set_phase(0.6)
        with compiled(module.graph, wanted) as found:
            losses.append(module.loss(IMAGES, LABELS))
            losses[-1].backward()
        assert (found.graphs, found.breaks) == (int(wanted), 0)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def stepped(
    module: QATModule, run: Any, names: list[str], images: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Runs a step by `run`; returns values by node (`names`) and gradients by parameter.

    The module's state is restored afterwards.
    """
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.zero_grad()
    outputs, values = run(images)
    F.cross_entropy(outputs, LABELS).backward()
    gradients = {n: p.grad.clone() for n, p in module.graph.named_parameters() if p.grad is not None}
    module.load_state_dict(state)
    return {name: value.detach() for name, value in zip(names, values, strict=True)}, gradients


# The last number is a seed whose images give no value on a rounding boundary or at an end of a range.
CASES = [(model, kind, 0.6, seed) for model, seed in (("cnn", 7), ("vit", 3)) for kind in KINDS]
CASES.append(("cnn", "plain", 0.1, 3))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("model", "kind", "progress", "seed"), CASES)
def test_gradients_are_those_of_eager_but_for_values_on_an_edge(
    model: str, kind: str, progress: float, seed: int
) -> None:
    module, images = module_of_kind(model, kind), noise(32, 3, 8, 8, seed=seed)
    module.set_phase(progress)
    calls = [n for n in module.graph.graph.nodes if n.op == "call_module" and n.args]
    pairs = {n.name: (n.args[0].name, module_of(n)) for n in calls if isinstance(module_of(n), FakeQuantize)}
    names = [*pairs, *(source for source, _ in pairs.values())]
    graph = tapped(module.graph, names)
    eager, expected = stepped(module, graph, names, images)
    again, _ = stepped(module, graph, names, images)
    assert all(torch.equal(value, again[name]) for name, value in eager.items())
    found, gradients = stepped(module, torch.compile(graph, dynamic=False), names, images)
    edges = 0
    for name, (source, fake) in pairs.items():
        assert isinstance(fake, FakeQuantize)
        scale, zero = (end.detach() for end in (fake.scale, fake.zero_point))
        first, second = (torch.round(values[name] / scale) for values in (eager, found))
        steps = eager[source] / scale
        on_boundary = (steps.frac().abs() - 0.5).abs() < NEAR
        assert bool(on_boundary[first != second].all()), name
        ends = [float(end - zero) for end in fake.spec.type_range]
        jumped = int((first != second).sum())
        edges += jumped + sum(int(((steps - end).abs() < NEAR).sum()) for end in ends if end)
        if jumped:
            break  # later values are computed from another integer
    assert not edges  # otherwise gradients may differ: choose another seed
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
