"""Tests that ranges match those of ONNX Runtime's calibrators, for a module and for the same net as a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from chain import noise, settle
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod, create_calibrator
from torch import Tensor, nn

from qatkit import QATModule
from qatkit.graph.quantizers import fake_quantizers
from qatkit.importing import import_onnx
from qatkit.quant.observers import MinMaxObserver, MSEObserver, Observer, PercentileObserver
from qatkit.quant.weight_fake_quantize import Quantizers

Ranges = dict[str, tuple[float, float]]
IMAGES = noise(32, 3, 12, 12)
TENSORS = ("input", "relu", "conv2")


class Net(nn.Module):
    """A net whose tensors have one sign (after ReLU), both signs, and a short negative tail (after SiLU)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.relu, self.silu, self.conv3 = nn.ReLU(), nn.SiLU(), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv3(self.silu(self.conv2(self.relu(self.conv1(x))))))


def net() -> Net:
    torch.manual_seed(0)
    return cast(Net, settle(Net(), 3, 12, 12))


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self.left: Iterator[Tensor] = iter(IMAGES.split(8))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.left, None)
        return None if batch is None else {"input": batch.numpy()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "net.onnx"
    sizes = {"x": {0: torch.export.Dim("N")}}
    made = torch.onnx.export(net(), (IMAGES[:2],), dynamo=True, dynamic_shapes=sizes, input_names=["input"])
    assert made is not None
    made.save(str(path))
    return path


def ours(given: Path | nn.Module, observer: Callable[[], Observer]) -> Ranges:
    """Returns the ranges of the first three quantizers in graph order."""
    of_file = isinstance(given, Path)
    batches: list[Any] = [{"input": one} if of_file else one for one in IMAGES.split(8)]
    model = import_onnx(given) if isinstance(given, Path) else given
    module = QATModule(model, batches[0], quantizers=Quantizers(observer=observer))
    module.calibrate(batches)
    observers = [q.observer for q in fake_quantizers(module.graph).values()]
    return {
        name: (one.low.item(), one.high.item())
        for name, one in zip(TENSORS, observers, strict=False)
        if one is not None
    }


def theirs(source: Path, method: CalibrationMethod, folder: Path, **options: Any) -> Ranges:
    """Returns the ranges of the same tensors by ONNX Runtime's calibrator."""
    nodes = onnx.load(source).graph.node
    relu = next(node.output[0] for node in nodes if node.op_type == "Relu")
    conv2 = [node.output[0] for node in nodes if node.op_type == "Conv"][1]
    calibrator = create_calibrator(source, None, str(folder / "more.onnx"), method, extra_options=options)
    calibrator.collect_data(_Reader())
    data = calibrator.compute_data().data
    ranges = {
        name: data[tensor].range_value for name, tensor in zip(TENSORS, ("input", relu, conv2), strict=True)
    }
    return {name: (np.asarray(low).item(), np.asarray(high).item()) for name, (low, high) in ranges.items()}


def values() -> dict[str, NDArray[np.float64]]:
    """Returns the values of the same tensors, computed by PyTorch."""
    model = net()
    with torch.no_grad():
        behind = model.relu(model.conv1(IMAGES))
        found = dict(zip(TENSORS, (IMAGES, behind, model.conv2(behind)), strict=True))
    return {name: one.double().numpy().reshape(-1) for name, one in found.items()}


@pytest.fixture(scope="module", params=["module", "file"])
def given(request: pytest.FixtureRequest, source: Path) -> Path | nn.Module:
    return source if request.param == "file" else net()


def test_min_max_is_that_of_ort(given: Path | nn.Module, source: Path, tmp_path: Path) -> None:
    found = ours(given, MinMaxObserver)
    for name, ends in theirs(source, CalibrationMethod.MinMax, tmp_path).items():
        assert found[name] == pytest.approx(ends, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("percentile", [99.0, 99.9])
def test_percentiles_clip_as_many_values_as_ort(
    percentile: float, given: Path | nn.Module, source: Path, tmp_path: Path
) -> None:
    """The counts of clipped values agree up to a histogram bin; after a ReLU, ONNX Runtime clips half as many."""
    found = ours(given, lambda: PercentileObserver(percentile))
    wanted = theirs(
        source, CalibrationMethod.Percentile, tmp_path, num_bins=8192, percentile=percentile, symmetric=False
    )
    for name, x in values().items():
        own, other = (((x < low).sum(), (x > high).sum()) for low, high in (found[name], wanted[name]))
        if name == "relu":
            assert own[0] == other[0] == 0 and abs(int(own[1]) - 2 * int(other[1])) <= 6
        else:
            assert np.abs(np.subtract(own, other)).max() <= 4, name
            assert sum(own) == pytest.approx(len(x) * (1 - percentile / 100), abs=4)


@pytest.mark.parametrize(
    "method", [CalibrationMethod.MinMax, CalibrationMethod.Entropy, CalibrationMethod.Percentile]
)
def test_least_error_is_below_that_of_ort(
    method: CalibrationMethod, given: Path | nn.Module, source: Path, tmp_path: Path
) -> None:
    found, wanted = ours(given, MSEObserver), theirs(source, method, tmp_path)
    for name, x in values().items():
        assert _error(x, found[name]) <= 1.001 * _error(x, wanted[name]), name


def _error(x: NDArray[np.float64], ends: tuple[float, float]) -> float:
    """Returns the mean squared error of 8-bit quantization."""
    low, high = min(ends[0], 0.0), max(ends[1], 0.0)
    scale = (high - low) / 255
    zero = np.rint(-low / scale)
    steps = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
    return float(np.square(steps * scale - x).mean())
