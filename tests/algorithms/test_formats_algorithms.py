"""Tests of GPTQ, SmoothQuant and bias correction with number formats such as MXFP4: output error and file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chain import calibrated, noise, prepared, run_ort, run_torch
from test_gptq import by_brain_surgeon, correlated
from torch import Tensor, fx, nn

from qatkit.algorithms import GPTQ, BiasCorrection, SmoothQuant
from qatkit.algorithms.gptq_columns import Columns
from qatkit.calibration import calibrate
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import set_phase
from qatkit.quant.backends import SIMULATED, Backend
from qatkit.quant.formats.blocks import quantized
from qatkit.quant.formats.table import FORMATS


def of(weight: str, activation: str = "float16") -> Backend:
    return replace(
        SIMULATED,
        weight=replace(SIMULATED.weight, dtype=weight),
        activation=replace(SIMULATED.activation, dtype=activation),
    )


def ready(model: nn.Module, x: Tensor, backend: Backend) -> fx.GraphModule:
    """Returns the calibrated graph of `model` with quantization on."""
    graph = calibrated(model.eval(), x, backend)
    set_phase(graph, observe=False, quantize=True)
    return graph


def lost(graph: fx.GraphModule, model: nn.Module, x: Tensor) -> float:
    """Returns the sum of squared output errors divided by the sum of squared float outputs."""
    with torch.no_grad():
        wanted = model(x)
        return float((graph(x) - wanted).square().sum() / wanted.square().sum())


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 40, bias=False), nn.ReLU(), nn.Linear(40, 8)
    )


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 32, 3, groups=2), nn.ReLU(), nn.Conv2d(32, 6, 1)
    )


def test_columns_of_a_float_grid_are_those_of_brain_surgeon() -> None:
    """FP4 values up to 2 are multiples of 0.5: weights this small have a uniform grid, as with integers."""
    x = correlated(160, 40).double()
    form = x.T @ x / len(x) + 0.5 * torch.eye(40)
    weight = noise(5, 40) / 10
    scale = torch.full_like(weight, 1.0)
    columns = Columns(form[None], order=True, damping=0.0)
    found = columns.rounded_to(weight[None], scale[None], FORMATS["mxfp4"].element)
    wanted = by_brain_surgeon(weight.double().numpy(), form.numpy(), np.full((5, 40), 0.5), (-4, 4), True)
    assert np.abs(wanted).max() < 4  # no value above 2, where FP4 steps are larger
    assert np.mean(found[0].numpy() != wanted / 2) < 0.02  # float32 may break ties differently


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp6_e2m3", "float8_e5m2"])
@pytest.mark.parametrize("kind", ["linears", "images"])
def test_gptq_lowers_the_error_of_formats(kind: str, name: str) -> None:
    model = linears() if kind == "linears" else images()
    x = (
        correlated(512, 48)
        if kind == "linears"
        else correlated(32 * 144, 3).reshape(32, 12, 12, 3).permute(0, 3, 1, 2)
    )
    seen, unseen = x[: len(x) // 2].contiguous(), x[len(x) // 2 :].contiguous()
    graph = ready(model, seen, of(name))
    before = lost(graph, model, unseen)
    result = GPTQ(images=len(seen))(graph, [seen])
    assert (result.changed, result.skipped) == (3, [])
    assert lost(graph, model, unseen) < 0.7 * before


def test_gptq_keeps_to_numbers_of_the_format_in_the_file(tmp_path: Path) -> None:
    x, model = correlated(256, 48), linears()
    graph = ready(model, x, of("mxfp4"))
    GPTQ(images=256)(graph, [x])
    converted = convert(graph).graph
    nearest = convert(ready(model, x, of("mxfp4"))).graph
    form = FORMATS["mxfp4"]
    weights = [one.weight.detach() for one in converted.modules() if isinstance(one, nn.Linear)]
    others = [one.weight.detach() for one in nearest.modules() if isinstance(one, nn.Linear)]
    for weight, other in zip(weights, others, strict=True):
        assert not torch.equal(weight, other)
        assert torch.equal(quantized(weight, form, form.granularity(1), torch.ones(()))[0], weight)
    path = tmp_path / "model.onnx"
    export_onnx(converted, x[:2], path)
    np.testing.assert_allclose(run_ort(path, x), run_torch(graph, x), atol=1e-4)
    assert path.stat().st_size < 30_000


def test_what_gptq_found_is_in_a_checkpoint_and_can_be_trained() -> None:
    x, model = correlated(128, 48), linears()
    graph, other = ready(model, x, of("mxfp4")), ready(model, x, of("mxfp4"))
    GPTQ(images=128)(graph, [x])
    other.load_state_dict(graph.state_dict())
    assert torch.equal(other(x), graph(x))
    other(x).sum().backward()
    assert all(one.weight.grad is not None for one in other.modules() if isinstance(one, nn.Linear))


def test_smooth_quant_spreads_an_outlier_of_a_block() -> None:
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(32), nn.Linear(32, 16)
    model = nn.Sequential(norm, linear).eval()
    with torch.no_grad():
        norm.weight[3] = 300.0
        linear.weight[:, 3] /= 300.0
    x = noise(256, 32)
    backend = of("mxint8", "mxfp4")
    plain = ready(model, x, backend)
    graph = prepared(model, x[:2], backend).eval()
    assert SmoothQuant(images=64)(graph, [x]).changed == 1
    torch.testing.assert_close(graph(x), model(x), atol=1e-4, rtol=1e-4)
    calibrate(graph, [x])
    set_phase(graph, observe=False, quantize=True)
    assert lost(graph, model, x) < 0.5 * lost(plain, model, x)


@pytest.mark.parametrize(("method", "left"), [("analytic", 0.7), ("empirical", 0.25)])
def test_bias_correction_takes_the_mean_error_of_formats(method: str, left: float) -> None:
    model, x = linears(), noise(256, 48) + 1
    graph = ready(model, x, of("mxfp4"))
    wanted = model(x)
    before = (graph(x) - wanted).mean(0).abs().max()
    BiasCorrection(method=method, images=256)(graph, [x])
    assert (graph(x) - wanted).mean(0).abs().max() < left * before
    set_phase(graph, observe=False, quantize=False)
    torch.testing.assert_close(graph(x), wanted)  # only quantized weights are corrected
