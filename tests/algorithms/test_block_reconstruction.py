"""Tests of block reconstruction and AdaRound: the loss (BRECQ's equation 10), learned scales and the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from chain import SMALL, calibrated, noise, run_ort, settle, small_vit
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, fx, nn

from qatkit.algorithms import AdaRound, BlockReconstruction
from qatkit.algorithms.base import Algorithm
from qatkit.algorithms.blocks.learn import output_error
from qatkit.algorithms.blocks.lesson import Lesson
from qatkit.algorithms.blocks.partition import blocks
from qatkit.algorithms.blocks.scales import LearnedScale
from qatkit.algorithms.blocks.scales import settle as settle_scales
from qatkit.algorithms.blocks.walk import BlockWalk
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import set_phase
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.scales.align import align
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.spec import QuantSpec

INT4 = OverrideConfig(weight_dtype="int4")


def _small(name: str) -> tuple[nn.Module, Tensor]:
    if name == "vit":
        return small_vit(), noise(16, 3, 32, 32)
    kind, shape = SMALL[name]
    torch.manual_seed(0)
    return settle(kind(), *shape), noise(32, *shape)


def _error(graph: fx.GraphModule, model: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        return float((graph(images) - model(images)).square().mean())


class _Watcher:
    """A learner that changes nothing and passes the `Lesson` of each block to `ask`."""

    def __init__(self, ask: Callable[[Lesson], None]) -> None:
        self.ask = ask

    def learn(self, lesson: Lesson) -> dict[str, Tensor]:
        set_phase(lesson.module, observe=False, quantize=True)
        self.ask(lesson)
        return {}

    def apply(self, lesson: Lesson, found: dict[str, Tensor]) -> None:
        pass


@pytest.mark.parametrize("fisher", [False, True])
def test_the_loss_is_equation_10(fisher: bool) -> None:
    """The loss is E[F ∘ (y' - y)²]; F is the Fisher importance, or 1 without it.

    y and y' are a block's outputs when the whole graph runs in float and quantized.
    """
    model, images = _small("residual")
    graph = calibrated(model, images, overrides={"*": INT4})  # far larger errors than caching y in float16
    found: dict[str, list[float]] = {}
    weights: dict[str, Tensor] = {}

    def ask(lesson: Lesson) -> None:
        name = lesson.block.outputs[0].name
        found[name] = [float(output_error(lesson, [i])) for i in range(lesson.chunks)]
        if lesson.importance is not None:
            weights[name] = lesson.importance([0, 1])[0]

    walker = BlockWalk.of(BlockReconstruction(images=32, batch_size=16), graph, [images])
    walker.walk(blocks(graph, 2), _Watcher(ask), "watching", fisher=fisher)
    values: list[dict[str, Any]] = []
    for quantize in (False, True):
        set_phase(graph, observe=False, quantize=quantize)
        keep = _Keep(graph)
        with torch.no_grad():
            keep.run(images)
        values.append(keep.values)
    assert len(found) == 3
    for name, losses in found.items():
        y, changed = (side[name].double().numpy() for side in values)
        weight = weights[name].double().numpy() if fisher else 1.0
        squares = weight * (changed - y) ** 2
        wanted = [squares[:16].mean(), squares[16:].mean()]
        np.testing.assert_allclose(losses, wanted, rtol=0.05)


class _Keep(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n.name] = super().run_node(n)
        return self.values[n.name]


def test_a_learned_scale_has_the_gradient_of_lsq() -> None:
    """By LSQ's equation 3, dy/ds is round(x/s) - x/s within the range and the bound outside.

    The parameter is p with s = s0 exp(p), so that the gradient is s times as large.
    """
    quantizer = FakeQuantize(QuantSpec(), MinMaxObserver())
    quantizer.observe(torch.tensor([-1.0, 3.0]))
    x = torch.linspace(-2, 5, 57)
    learned = LearnedScale(quantizer)
    quantizer.enabled = True
    assert torch.equal(learned(x), quantizer(x))
    (gradient,) = torch.autograd.grad(learned(x).sum(), learned.p)
    scale, zero = float(quantizer.scale), int(quantizer.zero_point)
    v = x.double().numpy() / scale
    ends = np.clip(v, -zero, 255 - zero)
    wanted = scale * np.where(ends == v, np.round(v) - v, ends).sum()
    assert float(gradient) == pytest.approx(wanted, rel=1e-4)


def test_learned_scales_are_ranges_that_alignment_starts_from() -> None:
    model, images = _small("residual")
    rare = torch.cat([images, 4 * images[:1]])  # one outlier image makes the ranges too wide for all others
    graph = calibrated(model, rare)
    before = _error(graph, model, images)
    algorithm = BlockReconstruction(images=32, batch_size=16, steps=40, scale_lr=0.02, operators=2)
    algorithm(graph, [images])
    scales = {name: float(q.scale) for name, q in fake_quantizers(graph).items()}
    align(graph)  # as before each export
    assert scales == {name: float(q.scale) for name, q in fake_quantizers(graph).items()}
    plain = {name: float(q.scale) for name, q in fake_quantizers(calibrated(model, rare)).items()}
    assert any(abs(scales[name] / plain[name] - 1) > 0.02 for name in plain)
    assert _error(graph, model, images) < before
    settle_scales(graph)
    assert scales == pytest.approx(
        {name: float(q.scale) for name, q in fake_quantizers(graph).items()}, rel=0.03
    )


CASES: list[tuple[str, Algorithm, OverrideConfig | None]] = [
    ("residual", BlockReconstruction(images=32, steps=60, batch_size=8), INT4),
    ("residual", BlockReconstruction(images=32, steps=60, batch_size=8, bias_lr=0.01, operators=2), None),
    (
        "chain",
        AdaRound(images=32, steps=60, batch_size=8),
        OverrideConfig(weight_dtype="int4", weight_granularity="per_tensor"),
    ),
    ("gate", AdaRound(images=32, steps=60, batch_size=8), None),
    ("block", BlockReconstruction(images=32, steps=60, batch_size=8), INT4),
    ("vit", BlockReconstruction(images=16, steps=20, batch_size=4), INT4),
]


@pytest.mark.parametrize(("name", "algorithm", "override"), CASES)
def test_the_file_holds_the_learned_rounding(
    name: str, algorithm: Algorithm, override: OverrideConfig | None, tmp_path: Path
) -> None:
    """Compares all integers and ONNX Runtime's outputs; rounding to nearest must have a larger error."""
    model, images = _small(name)
    overrides = None if override is None else {"*": override}
    graph = calibrated(model, images, overrides=overrides)
    before = _error(graph, model, images)
    assert algorithm(graph, images.split(6)).changed > 0
    assert _error(graph, model, images) < before
    wanted = {path: _integers(m) for path, m in graph.named_modules() if isinstance(m, QATOperator)}
    converted, path = convert(graph).graph, tmp_path / "model.onnx"
    for place, integers in wanted.items():
        assert np.array_equal(converted.get_buffer(f"{place}.weight").numpy(), integers), place
    export_onnx(converted, images[:2], path)
    stored = [numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer]
    for integers in wanted.values():
        same = [one for one in stored if one.dtype == np.int8 and sorted(one.shape) == sorted(integers.shape)]
        assert any(np.array_equal(one, integers) or np.array_equal(one, integers.T) for one in same)
    with torch.no_grad():
        outputs = converted(images).numpy()
    assert np.abs(run_ort(path, images) - outputs).mean() <= 1e-3 * np.abs(outputs).max()


def _integers(operator: QATOperator) -> NDArray[np.int8]:
    """Returns floor(W / s) plus the learned rounding (or W / s, rounded, if none was kept), clipped."""
    fake = operator.weight_fake_quant
    assert fake is not None
    weight = operator.weight.detach().numpy()
    scale = fake.scale(operator.weight).numpy().reshape(-1, *[1] * (weight.ndim - 1))
    steps = (
        np.round(weight / scale)
        if fake.rounding is None
        else np.floor(weight / scale) + fake.rounding.numpy()
    )
    whole: NDArray[np.int8] = np.clip(steps, -fake.spec.quant_max, fake.spec.quant_max).astype(np.int8)
    return whole


class Scaled(nn.Module):
    """A residual branch that ends in γ · Linear, as in ConvNeXt; γ has both signs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 24), nn.Linear(24, 12)
        self.gamma = nn.Parameter(0.5 * noise(12))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.gamma * self.fc2(torch.relu(self.fc1(x))))


def test_a_layer_scale_is_folded_into_the_learned_integers() -> None:
    torch.manual_seed(0)
    model, images = Scaled().eval(), noise(32, 3, 12)
    graph = calibrated(model, images, overrides={"*": INT4})
    assert AdaRound(images=32, steps=40, batch_size=16)(graph, [images]).changed == 2
    operator = cast(QATOperator, graph.get_submodule("fc2"))
    converted = convert(graph).graph
    signs = np.sign(model.gamma.detach().numpy())[:, None]
    assert np.array_equal(converted.get_buffer("fc2.weight").numpy(), _integers(operator) * signs)
    with torch.no_grad():
        torch.testing.assert_close(converted(images), graph(images), rtol=1e-4, atol=1e-4)


def test_no_better_rounding_is_said_and_nothing_is_changed() -> None:
    """The weights and inputs are already integer multiples of their scales."""
    model = nn.Sequential(nn.Linear(6, 4)).eval()
    images = torch.randint(0, 256, (16, 6), generator=torch.Generator().manual_seed(0)) / 255
    images[0, 0], images[0, 1] = 0, 1
    with torch.no_grad():
        cast(Tensor, model[0].weight).copy_(noise(4, 6).sign())
    graph = calibrated(model, images)
    with pytest.warns(UserWarning, match="AdaRound found nothing better than rounding to nearest"):
        assert AdaRound(images=16, steps=5)(graph, [images]).changed == 0
    fake = cast(QATOperator, graph.get_submodule("0")).weight_fake_quant
    assert fake is not None and fake.rounding is None and not fake.frozen
