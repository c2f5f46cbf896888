"""Tests of GPTQ: rounded columns against optimal brain quantization in NumPy, and outputs against float."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import noise
from numpy.typing import NDArray
from onnx import TensorProto
from tied_net import Tied
from torch import Tensor, fx, nn

from qatkit.algorithms import GPTQ
from qatkit.algorithms.blocks.journal import block_file, working
from qatkit.algorithms.gptq_columns import Columns
from qatkit.calibration import calibrate
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.captured import Captured
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import set_phase
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import quantized_operators
from qatkit.quant.backends import FBGEMM, WEIGHT_ONLY, Backend
from qatkit.quant.granularity import PerBlock, PerChannel
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.weight_fake_quantize import WeightFakeQuantize

Array = NDArray[np.float64]
CHANNELS = replace(WEIGHT_ONLY, weight=replace(WEIGHT_ONLY.weight, granularity=PerChannel(0)))


def correlated(rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Returns inputs with most of their variance in a few directions, and with nonzero means."""
    directions = noise(inputs + 1, inputs)
    mixing = directions[:-1] * torch.linspace(2.0, 0.02, inputs)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator) @ mixing.T + directions[-1]


def by_brain_surgeon(weight: Array, form: Array, scale: Array, ends: tuple[int, int], order: bool) -> Array:
    """Returns the integers of optimal brain quantization, found column by column.

    Each column's rounding error is spread over the others by the inverse of `form` (the second moments of the
    inputs); the column is then eliminated from the inverse.
    """
    weight, inverse, found = weight.copy(), np.linalg.inv(form), np.zeros_like(weight)
    places = np.argsort(-np.diag(form), kind="stable") if order else np.arange(len(form))
    for at in places:
        found[:, at] = np.clip(np.round(weight[:, at] / scale[:, at]), *ends)
        error = (weight[:, at] - found[:, at] * scale[:, at]) / inverse[at, at]
        weight -= error[:, None] * inverse[at]
        inverse = inverse - np.outer(inverse[:, at], inverse[at]) / inverse[at, at]
    return found


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("inputs", [7, 200])  # fewer and more columns than one block of the algorithm
def test_columns_are_those_of_optimal_brain_quantization(inputs: int, order: bool) -> None:
    x = correlated(4 * inputs, inputs).double()
    form = x.T @ x / len(x) + 0.05 * torch.eye(inputs)
    weight = noise(5, inputs)
    scale = (weight.abs().amax(1, keepdim=True) / 7).expand_as(weight)
    found = Columns(form[None], order=order, damping=0.0).rounded(weight[None], scale[None], (-7, 7))
    wanted = by_brain_surgeon(weight.double().numpy(), form.numpy(), scale.double().numpy(), (-7, 7), order)
    assert np.mean(found[0].numpy() != wanted) < 0.005  # float32 may break ties differently


def test_groups_and_inputs_that_are_always_zero() -> None:
    """Each group uses its own moments; the weights of an input that is always 0 are rounded to nearest."""
    forms = torch.stack([torch.diag(torch.tensor([1.0, 2.0, 0.0])), correlated(50, 3).T.cov()])
    weight = noise(2, 4, 3)
    scale = torch.full_like(weight, 0.25)
    found = Columns(forms, order=True, damping=0.01).rounded(weight, scale, (-8, 7))
    for group in range(2):
        own = Columns(forms[[group]], order=True, damping=0.01)
        alone = own.rounded(weight[[group]], scale[[group]], (-8, 7))
        assert torch.equal(found[[group]], alone)
    assert torch.equal(found[0], (weight[0] / 0.25).round().clamp(-8, 7))  # independent inputs


def test_a_singular_form_is_damped_until_it_can_be_inverted() -> None:
    one = torch.ones(1, 6, 6)  # six copies of one input
    found = Columns(one, order=True, damping=0.0).rounded(noise(1, 3, 6), torch.full((1, 3, 6), 0.5), (-8, 7))
    sums = (found * 0.5).sum(2) - noise(1, 3, 6).sum(2)
    assert float(sums.abs().max()) <= 0.26  # the six errors add up to at most half a step


def test_moments_that_are_not_finite_are_refused() -> None:
    form = torch.full((1, 2, 2), torch.inf)
    with pytest.raises(ValueError, match="the second moments are not finite, because the inputs"):
        Columns(form, order=True, damping=0.1)


def prepared(model: nn.Module, x: Tensor, backend: Backend = WEIGHT_ONLY) -> fx.GraphModule:
    graph = Captured(model.eval(), x).graph()
    prepare_qat(graph, backend, x)
    set_phase(graph, observe=False, quantize=True)
    return graph.eval()


def lost(graph: fx.GraphModule, model: nn.Module, x: Tensor) -> float:
    """Returns the sum of squared output errors divided by the sum of squared float outputs."""
    with torch.no_grad():
        wanted = model(x)
        return float((graph(x) - wanted).square().sum() / wanted.square().sum())


class Chain(nn.Module):
    """Linears with and without a bias, and activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 64), nn.Linear(64, 40, bias=False)
        self.last = nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return cast(Tensor, self.last(torch.relu(self.second(hidden)) + 0.5))


class Convolutions(nn.Module):
    """A full, a depthwise and a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.grouped = nn.Conv2d(16, 12, 1, groups=4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.grouped(torch.relu(self.depthwise(torch.relu(self.first(x))))))


CASES = {
    "linears": (Chain, correlated(512, 48), correlated(300, 48, 1)),
    "images": (
        Convolutions,
        correlated(64 * 12, 12).reshape(64, 1, 12, 12).repeat(1, 3, 1, 1) + 0.3 * noise(64, 3, 12, 12),
        correlated(40 * 12, 12, 2).reshape(40, 1, 12, 12).repeat(1, 3, 1, 1) + 0.3 * noise(40, 3, 12, 12),
    ),
}


@pytest.mark.parametrize("backend", [WEIGHT_ONLY, CHANNELS], ids=["blocks", "channels"])
@pytest.mark.parametrize("case", CASES)
def test_outputs_lose_less_than_by_rounding_to_the_nearest(case: str, backend: Backend) -> None:
    kind, seen, unseen = CASES[case]
    torch.manual_seed(0)
    model = kind()
    nearest = lost(prepared(model, seen, backend), model, unseen)
    found = {}
    for past in (0.0, 0.5):
        graph = prepared(model, seen, backend)
        result = GPTQ(images=len(seen), batch_size=32, past=past)(graph, [seen])
        assert result.changed == 3 and not result.skipped
        found[past] = lost(graph, model, unseen)
    assert max(found.values()) < 0.5 * nearest
    assert found[0.5] < 1.02 * found[0.0]


@pytest.mark.parametrize("scales", [False, True])
def test_scales_and_integers_are_those_that_ship(scales: bool) -> None:
    torch.manual_seed(0)
    model, x = Chain(), CASES["linears"][1]
    graph = prepared(model, x)
    before = {name: fake.scale(op.weight).clone() for name, op, fake in _weights(graph)}
    GPTQ(images=64, batch_size=16, scales=scales)(graph, [x])
    for name, operator, fake in _weights(graph):
        assert scales or torch.equal(fake.scale(operator.weight), before[name])
        shipped = fake.integers(operator.weight, None, torch.ones(()))
        assert int(shipped.weight.min()) >= -8 and int(shipped.weight.max()) <= 7
        spread = fake.spec.granularity
        counted = shipped.weight - spread.spread(shipped.zero_point, operator.weight.shape)
        values = counted * spread.spread(shipped.scale, operator.weight.shape)
        torch.testing.assert_close(fake(operator.weight)[0], values, rtol=1e-5, atol=1e-7)


def _weights(graph: fx.GraphModule) -> list[tuple[str, QATOperator, WeightFakeQuantize]]:
    return [(str(node.target), operator, fake) for node, operator, fake in quantized_operators(graph)]


def test_a_bias_takes_the_mean_error() -> None:
    """Over the calibration samples, each output must have the same mean as in float."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(48, 24)), correlated(256, 48)
    graph = prepared(model, x)
    GPTQ(images=256, batch_size=64)(graph, [x])
    with torch.no_grad():
        torch.testing.assert_close(graph(x).mean(0), model(x).mean(0), rtol=0, atol=2e-4)


def test_weights_are_rounded_with_quantized_activations_too() -> None:
    """GPTQ also works with a backend whose activation ranges are calibrated first."""
    torch.manual_seed(0)
    model, (_, x, unseen) = Chain(), CASES["linears"]
    four = replace(FBGEMM, weight=replace(FBGEMM.weight, dtype="int4"))
    losses = []
    for algorithm in (None, GPTQ(images=256, batch_size=32)):
        graph = prepared(model, x, four)
        calibrate(graph, [(x,)])
        set_phase(graph, observe=False, quantize=True)
        if algorithm is not None:
            algorithm(graph, [x])
        losses.append(lost(graph.eval(), model, unseen))
    assert losses[1] < 0.6 * losses[0]


def test_a_weight_that_serves_two_calls_is_named() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.one(torch.relu(self.one(x))))

    x = correlated(32, 32)
    graph = prepared(Twice(), x)
    assert [reason for _, reason in GPTQ(images=16)(graph, [x]).skipped] == [
        "rounded to nearest: several calls share its weight"
    ] * 2


def test_a_tied_table_has_the_integers_of_the_head(tmp_path: Path) -> None:
    nearest, found = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        words = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(seed))
        model = Tied()
        nearest.append(lost(prepared(model, words), model, words))
        graph = prepared(model, words)
        result = GPTQ(images=64, batch_size=16)(graph, [words])
        assert result.changed == 2 and not result.skipped and not GPTQ().notes(graph)
        found.append(lost(graph, model, words))
    assert sum(found) < 0.9 * sum(nearest)
    head, table = (cast(QATOperator, graph.get_submodule(name)) for name in ("head", "table"))
    assert torch.equal(head.quantized(head.weight, None)[0], table(torch.arange(50)))

    path = tmp_path / "tied.onnx"
    export_onnx(convert(graph).graph, words[:2], path)
    sizes = [
        len(one.raw_data) for one in onnx.load(path).graph.initializer if one.data_type == TensorProto.UINT8
    ]
    assert sizes.count(50 * 16) == 1  # the table of 50 x 32 weights in 4 bits is stored once
    found = ort.InferenceSession(path).run(None, {"input": words.numpy()})[0]
    np.testing.assert_allclose(found, graph(words).detach().numpy(), atol=1e-5)


class Prompted(nn.Module):
    """A net that prepends a token to each sequence; it reads the batch size a layer before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 32), nn.Linear(32, 8)
        self.token = nn.Parameter(noise(1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        images = x.shape[0]
        hidden = torch.relu(self.first(x))
        return cast(Tensor, self.second(torch.cat([self.token.expand(images, -1, -1), hidden], 1)))


def test_sizes_that_are_alive_between_layers_are_kept() -> None:
    torch.manual_seed(0)
    model, x = Prompted(), correlated(320, 48).reshape(32, 10, 48)
    unseen = correlated(160, 48, 1).reshape(16, 10, 48)
    nearest = lost(prepared(model, x), model, unseen)
    graph = prepared(model, x)
    GPTQ(images=32, batch_size=8)(graph, [x])
    assert lost(graph, model, unseen) < 0.7 * nearest


def test_blocks_need_the_whole_row_of_moments() -> None:
    """Moment rounding needs one scale per row; its note on weights with scales per block recommends GPTQ."""
    from qatkit.algorithms import MomentRounding

    graph = prepared(Chain(), correlated(8, 48))
    reasons = {reason for _, reason in MomentRounding().notes(graph)}
    assert reasons == {"rounded to nearest: it has scales in blocks (algorithm=gptq supports them)"}
    assert isinstance(WEIGHT_ONLY.weight.granularity, PerBlock)


def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    """Finished operators are stored before the kill; the resumed run gives the same outputs bit for bit."""
    torch.manual_seed(0)
    model, x = Chain(), CASES["linears"][1]
    algorithm = GPTQ(images=64, batch_size=16)
    whole = prepared(model, x)
    algorithm(whole, [x])
    file = tmp_path / "gptq.partial"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    broken = prepared(model, x)
    operators = [operator for _, operator, _ in quantized_operators(broken)]
    operators[1].register_forward_hook(killed)
    with working(progress=False, seed=0, file=file), pytest.raises(KeyboardInterrupt):
        algorithm(broken, [x])
    assert block_file(file, 0).is_file() and not block_file(file, 1).exists()
    again = prepared(model, x)
    with working(progress=False, seed=0, file=file):
        algorithm(again, [x])
    with torch.no_grad():
        assert torch.equal(again(x), whole(x))
