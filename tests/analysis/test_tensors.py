"""Tests of per-tensor metrics against NumPy, and of faults planted in a scale or in the file."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from chain import Gate, Residual, noise, prepared, settle, small_vit
from onnx import numpy_helper
from torch import Tensor, fx

from qatkit.analysis.runtime_tensors import RuntimeTensors, compared_with_file
from qatkit.analysis.switches import Switch, switches
from qatkit.analysis.tensors import PairSums, Tensors, avoidable, tensors, without_histograms
from qatkit.calibration import calibrate
from qatkit.export.converted_reference import ConvertedReference
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.phase import set_phase
from qatkit.quant.backends import FBGEMM
from qatkit.quant.fake_quantize import FakeQuantize
from qatkit.quant.granularity import PerTensor
from qatkit.quant.qat_layers import QATOperator
from qatkit.quant.spec import QuantSpec
from qatkit.records.analysis import ACTIVATION, WEIGHT, Comparison
from qatkit_verify.errors import ConfigError

IMAGES = noise(24, 3, 12, 12)
BATCHES = IMAGES[:12].split(4)
Fault = Callable[[onnx.ModelProto], None]


@functools.cache
def _made(name: str) -> fx.GraphModule:
    torch.manual_seed(0)
    model, images = (
        (settle(Residual(), 3, 12, 12), IMAGES) if name == "residual" else (small_vit(), noise(16, 3, 32, 32))
    )
    graph = prepared(model, images[:2]).eval()
    calibrate(graph, [images])
    return graph


def residual() -> fx.GraphModule:
    """Returns a calibrated residual net that a test may damage."""
    return copy.deepcopy(_made("residual"))


def vit() -> fx.GraphModule:
    """Returns a calibrated transformer that a test may damage."""
    return copy.deepcopy(_made("vit"))


def test_sums_over_batches_are_numpys_figures_of_the_whole() -> None:
    x, y = (noise(1000, seed=seed).numpy().astype(np.float64) for seed in (1, 2))
    y = x + 0.1 * y + 0.01
    sums = PairSums()
    for part in np.split(np.arange(1000), [100, 650]):
        sums.add(torch.from_numpy(x[part]).reshape(-1, 10), torch.from_numpy(y[part]))
    found = sums.difference()
    assert found.mse == pytest.approx(np.square(x - y).mean())
    assert found.sqnr == pytest.approx(10 * np.log10(np.square(x).sum() / np.square(x - y).sum()))
    assert found.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    assert found.largest == pytest.approx(np.abs(x - y).max())
    assert found.shift == pytest.approx(y.mean() - x.mean())
    same = PairSums()
    same.add(torch.ones(3), torch.ones(3))
    assert same.difference().sqnr is None and same.difference().cosine == 1


def test_rows_are_what_a_run_with_hooks_sees() -> None:
    graph = residual()
    (quantizer,) = next(s for s in switches(graph) if s.key == "activation conv1").quantizers
    assert isinstance(quantizer, FakeQuantize)
    quantizer.scale.div_(2)  # so that some values are clipped
    seen: dict[bool, list[Tensor]] = {True: [], False: []}
    for quantize in (False, True):
        set_phase(graph, observe=False, quantize=quantize)
        handle = quantizer.register_forward_hook(lambda m, i, o, to=seen[quantize]: to.append(o))
        with torch.no_grad():
            graph(IMAGES[:12])
        handle.remove()
    x, y = (seen[q][0].double().numpy().ravel() for q in (False, True))
    scale, zero = float(quantizer.scale), int(quantizer.zero_point)
    integers = np.clip(np.rint(x / scale) + zero, 0, 255)
    own = (integers - zero) * scale - x
    row = next(r for r in tensors(graph, BATCHES).rows if (r.site, r.kind) == ("conv1", ACTIVATION))
    assert row.own.mse == pytest.approx(np.square(own).mean(), rel=1e-3)
    assert row.own.largest == pytest.approx(np.abs(own).max(), rel=1e-3)
    assert row.simulated is not None
    assert row.simulated.mse == pytest.approx(np.square(y - x).mean(), rel=1e-3)
    assert row.simulated.shift == pytest.approx(y.mean() - x.mean(), rel=1e-2)
    beyond = (x > (255 - zero + 0.5) * scale) | (x < (-zero - 0.5) * scale)
    assert 0 < row.clipped == pytest.approx(beyond.mean())
    assert row.grid == pytest.approx(len(np.unique(integers)) / 256)
    step = (max(x.max(), 0) - min(x.min(), 0)) / 255
    offset = np.rint(-min(x.min(), 0) / step)
    best = (np.clip(np.rint(x / step) + offset, 0, 255) - offset) * step - x
    assert row.avoidable == pytest.approx(
        10 * np.log10(np.square(own).sum() / np.square(best).sum()), rel=1e-2
    )
    assert row.histogram is not None and sum(row.histogram.exact) == sum(row.histogram.found) == x.size
    assert (row.histogram.range_low, row.histogram.range_high) == pytest.approx(
        (-zero * scale, (255 - zero) * scale)
    )


def test_a_weight_is_compared_on_its_own() -> None:
    graph = residual()
    switch = next(s for s in switches(graph) if s.key == "weight conv2")
    assert switch.operator is not None
    weight = switch.operator.weight.detach().double().numpy()
    scale = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127
    scale = switch.quantizers[0].scale(switch.operator.weight).detach().double().numpy().reshape(scale.shape)  # type: ignore[operator]
    error = np.rint(weight / scale) * scale - weight
    row = next(r for r in tensors(graph, BATCHES).rows if (r.site, r.kind) == ("conv2", WEIGHT))
    assert row.own.mse == pytest.approx(np.square(error).mean(), rel=1e-3)
    assert row.simulated is None and row.runtime is None and row.clipped == 0


def test_weights_with_zero_points_fill_their_type() -> None:
    """The range goes from the smallest to the largest value, within half a step, so that none is clipped."""
    torch.manual_seed(0)
    model = settle(Residual(), 3, 12, 12)
    for weight in (one for one in model.parameters() if one.ndim > 1):
        weight.data.add_(weight.std())
    backend = replace(FBGEMM, weight=QuantSpec("int8", granularity=PerTensor()))
    graph = prepared(model, IMAGES[:2], backend).eval()
    calibrate(graph, [IMAGES])
    rows = {row.site: row for row in tensors(graph, BATCHES).rows if row.kind == WEIGHT}
    assert set(rows) == {"stem", "conv1", "conv2", "fc"}
    for site, row in rows.items():
        operator = cast(QATOperator, graph.get_submodule(site))
        values = operator.effective()[0].detach()
        assert row.clipped == 0 and row.avoidable < 1 and row.histogram is not None
        assert row.histogram.range_low == pytest.approx(float(values.min()), abs=0.012)
        assert row.histogram.range_high == pytest.approx(float(values.max()), abs=0.012)
        whole = np.rint(
            (values.double().numpy() - float(values.min())) / float(values.max() - values.min()) * 255
        )
        assert row.grid == pytest.approx(len(np.unique(whole)) / 256, abs=0.05)


def widened(switch: Switch, by: float) -> None:
    """Plants a fault: multiplies the scale of a weight or activation by `by`."""
    (quantizer,) = switch.quantizers
    if isinstance(quantizer, FakeQuantize):
        quantizer.scale.mul_(by)
    else:
        assert switch.operator is not None
        quantizer.fix(quantizer.scale(switch.operator.effective()[0]) * by)  # type: ignore[operator]


@pytest.mark.parametrize("by", [4.0, 0.25])
@pytest.mark.parametrize("kind", [WEIGHT, ACTIVATION])
@pytest.mark.parametrize("make", [residual, vit], ids=["residual", "vit"])
def test_a_planted_scale_is_named_wherever_it_is(
    make: Callable[[], fx.GraphModule], kind: str, by: float
) -> None:
    places = range(len([s for s in switches(make()) if s.kind == kind]))
    for place in list(places)[:: max(1, len(places) // 3)]:
        graph = make()
        switch = [s for s in switches(graph) if s.kind == kind][place]
        widened(switch, by)
        batches = BATCHES[:1] if make is residual else (noise(4, 3, 32, 32),)
        found = tensors(graph, batches)
        assert found.suspect == switch.key
        worst = max(found.rows, key=lambda row: row.avoidable)
        assert worst.avoidable > 7 and (worst.clipped > 0) == (by < 1)


@functools.cache
def exported() -> tuple[fx.GraphModule, fx.GraphModule, bytes]:
    """Returns the simulation, the converted module and the bytes of its file."""
    graph = residual()
    converted = convert(graph).graph
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(converted, IMAGES[:2], Path(folder) / "m.onnx")
        return graph, converted, (Path(folder) / "m.onnx").read_bytes()


def compared(path: Path, fault: Fault | None = None) -> Comparison:
    """Compares every tensor of the simulation and of the file, after `fault` has changed only the file."""
    graph, converted, content = exported()
    path.write_bytes(content)
    if fault is not None:
        model = onnx.load(str(path))
        fault(model)
        onnx.save(model, str(path))
    return compared_with_file(graph, RuntimeTensors(path, ConvertedReference(converted), threads=1), BATCHES)


def test_a_faithful_file_computes_what_the_simulation_does(tmp_path: Path) -> None:
    found = compared(tmp_path / "m.onnx")
    assert found.first is None and found.suspect is None and found.images == 12 and found.notes == []
    for row in found.rows:
        if row.kind == ACTIVATION:
            assert row.runtime is not None and row.simulated is not None
            assert row.runtime.mse == pytest.approx(row.simulated.mse, rel=1e-3)


def scaled(name: str) -> Fault:
    """Returns a fault that makes a weight's scale four times larger."""

    def change(model: onnx.ModelProto) -> None:
        (node,) = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == name]
        (tensor,) = [t for t in model.graph.initializer if t.name == node.input[1]]
        new = numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(4), f"{tensor.name}_changed")
        model.graph.initializer.append(new)
        node.input[1] = new.name

    return change


def turned(name: str) -> Fault:
    """Returns a fault that applies a weight's per-output-channel scales to its input channels."""

    def change(model: onnx.ModelProto) -> None:
        (node,) = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == name]
        del node.attribute[:]
        node.attribute.append(onnx.helper.make_attribute("axis", 1))

    return change


@pytest.mark.parametrize(
    ("fault", "module"), [(scaled, "stem"), (scaled, "conv2"), (turned, "conv1"), (turned, "conv2")]
)
def test_a_fault_of_the_file_is_named_with_its_operator(
    fault: Callable[[str], Fault], module: str, tmp_path: Path
) -> None:
    found = compared(tmp_path / "m.onnx", fault(f"{module}.weight"))
    assert (
        found.first is not None
        and found.first.startswith(f"'{module}_quant/")
        and f"of '{module}/" in found.first
    )
    assert found.suspect is None  # the simulation has no fault
    rows = [row for row in found.rows if row.kind == ACTIVATION and row.runtime and row.simulated]
    away = [row.site for row in rows if row.runtime.mse > 2 * row.simulated.mse]  # type: ignore[union-attr]
    assert away[0] == module


def test_a_file_without_the_tensors_leaves_them_out(tmp_path: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.name = f"other/{node.name}"

    found = compared(tmp_path / "m.onnx", rename)
    assert all(row.runtime is None for row in found.rows) and len(found.rows) > 5
    assert found.first is None and found.notes == []


def test_what_cannot_be_run_is_a_note(tmp_path: Path) -> None:
    def widen(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4

    found = compared(tmp_path / "m.onnx", widen)
    assert len(found.rows) > 5 and found.rows[0].runtime is None
    assert len(found.notes) == 1 and found.notes[0].startswith("tensors were not compared in ONNX Runtime (")


def test_a_range_that_is_fixed_is_no_suspect() -> None:
    """A sigmoid whose values stay near 0.5 uses little of its fixed range from 0 to 1."""
    torch.manual_seed(0)
    model = settle(Gate(), 3, 8, 8)
    with torch.no_grad():
        model.get_submodule("fc2").weight.mul_(1e-3)  # type: ignore[operator]
        model.get_submodule("fc2").bias.zero_()  # type: ignore[operator]
    images = noise(8, 3, 8, 8)
    graph = prepared(model, images[:2]).eval()
    calibrate(graph, [images])
    found = tensors(graph, [images])
    row = next(r for r in found.rows if (r.site, r.kind) == ("gate", ACTIVATION))
    assert row.grid < 0.05 and row.avoidable == 0 and found.suspect is None


def test_histograms_are_kept_where_they_are_drawn() -> None:
    found = without_histograms(tensors(residual(), BATCHES), ["weight conv1", "activation input"])
    assert [f"{r.kind} {r.site}" for r in found.rows if r.histogram] == ["activation input", "weight conv1"]


def test_errors_of_nothing() -> None:
    assert avoidable(0.0, 0.0) == 0 and avoidable(1.0, 0.0) == 99 and avoidable(0.0, 1.0) == -99
    assert avoidable(4.0, 1.0) == pytest.approx(10 * np.log10(4))
    with pytest.raises(ConfigError, match=r"analysis\.tensors=0"):
        Tensors(residual(), [])
