"""trainer.compile: one graph a phase, without breaks, that computes what the eager step does.

A compiler adds and multiplies in another order, so values differ in their last bits; a quantizer makes a whole step of
that where a value lies on the boundary between two. Held is that integers differ nowhere else, and that gradients agree
where no integer differs. The compiler needs a C++ compiler and minutes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chain import noise, settle
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torchvision.models.vision_transformer import VisionTransformer
from tiny_run import Net

from qatkit.classifier import make_optimizer
from qatkit.config.schema import ScheduleConfig
from qatkit.distillation import tapped
from qatkit.fake_quantize import FakeQuantize
from qatkit.graph.nodes import module_of
from qatkit.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.module import QATModule
from qatkit.run.compiled import compiled
from qatkit.weight_fake_quantize import Quantizers

pytestmark = pytest.mark.slow
KINDS = {"plain": Quantizers(), "lsq": Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)}
NEAR = 1e-4  # steps: float32 sums of a few hundred products, in another order
IMAGES, LABELS = noise(32, 3, 8, 8), torch.arange(32) % 10


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return settle(Net(), 3, 8, 8)


def vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    model = VisionTransformer(image_size=8, patch_size=4, num_classes=10, **sizes)
    nn.init.normal_(model.heads[-1].weight)  # torchvision's zeros leave nothing to train
    return model


MODELS = {"cnn": (cnn, "train"), "cnn, folded": (cnn, "fold"), "vit": (vit, "fold")}


def module_of_kind(model: str, kind: str) -> QATModule:
    build, batch_norm = MODELS[model]
    schedule = ScheduleConfig(batch_norm=batch_norm, freeze_batch_norm=1.0, lr=1e-3)
    module = QATModule(build(), IMAGES[:2], schedule, quantizers=KINDS[kind])
    module.calibrate([IMAGES])
    module.begin()
    module.train()
    return module


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_a_phase_is_one_graph_without_breaks(model: str, kind: str) -> None:
    module = module_of_kind(model, kind)
    optimizer = make_optimizer(module.graph, module.schedule, 1e-3)
    with compiled(module.graph, True) as found:
        for progress, phases in ((0.1, 1), (0.6, 2)):  # observing, then with ranges that stand
            for step in range(4):
                module.set_phase(progress + step / 100)
                optimizer.zero_grad()
                F.cross_entropy(module.graph(IMAGES + step), LABELS).backward()
                optimizer.step()
            assert counters["stats"]["unique_graphs"] <= phases
    assert found.breaks == 0
    assert found.graphs == 2


def stepped(module: QATModule, run: Any, names: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values of `names`, and the gradients of a step from the same state."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.zero_grad()
    outputs, values = run(IMAGES)
    F.cross_entropy(outputs, LABELS).backward()
    gradients = {n: p.grad.clone() for n, p in module.graph.named_parameters() if p.grad is not None}
    module.load_state_dict(state)
    return {name: value.detach() for name, value in zip(names, values, strict=True)}, gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_integers_differ_on_boundaries_alone_and_gradients_nowhere_else(model: str, kind: str) -> None:
    module = module_of_kind(model, kind)
    module.set_phase(0.6)
    pairs = {
        node.name: node.args[0].name
        for node in module.graph.graph.nodes
        if node.op == "call_module" and isinstance(module_of(node), FakeQuantize)
    }
    quantizers = {n.name: module_of(n) for n in module.graph.graph.nodes if n.name in pairs}
    names = [*pairs, *pairs.values()]
    graph = tapped(module.graph, names)
    eager, expected = stepped(module, graph, names)
    again, same = stepped(module, graph, names)
    assert all(torch.equal(value, again[name]) for name, value in eager.items())
    found, gradients = stepped(module, torch.compile(graph, dynamic=False), names)
    flipped = 0
    for name, source in pairs.items():
        scale = quantizers[name].scale.detach()
        first, second = (torch.round(values[name] / scale) for values in (eager, found))
        differ = first != second
        position = (eager[source] / scale).frac().abs()
        assert bool(((position - 0.5).abs()[differ] < NEAR).all()), name
        flipped += int(differ.sum())
    if flipped == 0:
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
