"""Tests of mixed scales: a tensor is left float only if one scale would lose its small values."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import build, noise, small_vit
from numpy.typing import NDArray
from torch import Tensor, nn

from qatkit.calibration.mixed_scales import mixed_scales
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.train.module import QATModule
from qatkit.verify.audit import audit

IMAGES = noise(32, 3, 12, 12)


class Detector(nn.Module):
    """A detector that concatenates boxes (in pixels) and scores: [N, 7, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 3, 1)
        with torch.no_grad():
            self.boxes.weight *= 300

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x))
        return torch.cat((self.boxes(y), torch.sigmoid(self.scores(y))), 1)


class LastAxis(Detector):
    """A Detector whose output is a list of boxes: [N, H·W, 7]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(2).transpose(1, 2)


class OneHead(nn.Module):
    """A detector whose boxes and logits are channels of one convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 7, 1)
        with torch.no_grad():
            self.head.weight[:4] *= 300

    def forward(self, x: Tensor) -> Tensor:
        boxes, logits = self.head(torch.relu(self.conv(x))).split((4, 3), 1)
        return torch.cat((boxes, torch.sigmoid(logits)), 1)


class FrontEnd(nn.Module):
    """A filter bank, the logarithm of its energies (over six orders of magnitude), and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filters, self.conv = nn.Conv1d(1, 16, 32, stride=16, bias=False), nn.Conv1d(16, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv(torch.log(self.filters(x).square() + 1e-8)))


class Spectrum(nn.Module):
    """Sums energies in bands, whose sums differ by a factor of almost 10⁴, then a logarithm and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filters, self.bands = nn.Conv1d(1, 16, 32, stride=16, bias=False), nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 8)
        with torch.no_grad():
            self.filters.weight *= torch.logspace(0, -2, 16)[:, None, None]
            self.bands.weight.copy_(torch.eye(8).repeat_interleave(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        energies = self.filters(x).square().transpose(1, 2)
        return cast(Tensor, self.head(torch.log(self.bands(energies) + 1e-8)))


def shipped(
    model: nn.Module, images: Tensor, path: Path, mixed: str = "float", **options: object
) -> QATModule:
    """Returns a calibrated module, and exports it to `path`."""
    module = QATModule(model.eval(), images[:2], **options)  # type: ignore[arg-type]
    module.mixed_scales = mixed
    assert module.calibrate(images.split(16)) == len(images)
    export_onnx(module.convert().graph, images[:2], path)
    return module


def run(path: Path, images: Tensor) -> NDArray[np.float32]:
    """Returns the first output of ONNX Runtime."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return cast("NDArray[np.float32]", session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])


def decibel(exact: NDArray[np.float32], found: NDArray[np.float32], axis: int) -> NDArray[np.float64]:
    """Returns each channel's variance divided by its error power, in dB."""
    others = tuple(i for i in range(exact.ndim) if i != axis)
    errors = np.square(found - exact.astype(np.float64)).mean(others)
    return np.asarray(10 * np.log10(exact.astype(np.float64).var(others) / errors))


@pytest.mark.parametrize(("kind", "axis"), [(Detector, 1), (LastAxis, 2), (OneHead, 1)])
def test_scores_beside_boxes_stay_float(kind: type[nn.Module], axis: int, tmp_path: Path) -> None:
    model, images = kind(), noise(8, 3, 12, 12, seed=1)
    exact = model(images).detach().numpy()
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"

    told = shipped(model, IMAGES, before, "report")
    module = shipped(model, IMAGES, after)

    lost, kept = (decibel(exact, run(path, images), axis) for path in (before, after))
    assert (lost[4:] < 3).all() and (kept > 18).all()
    assert [one.tensor for one in told.mixed] and not told.floats and "cat" in module.floats
    assert {loss.lost for one in module.mixed for loss in one.losses if one.tensor == "cat"} == {3}
    assert "head" in module.floats if kind is OneHead else not {"boxes", "scores"} & {*module.floats}
    convs = [node for node in onnx.load(after).graph.node if node.op_type == "Conv"]
    assert len(convs) == (2 if kind is OneHead else 3)
    assert not audit(after, allow_float=module.left_float).problems


def test_nothing_of_mixed_scale_is_left(tmp_path: Path) -> None:
    module = shipped(Detector(), IMAGES, tmp_path / "a.onnx")
    assert mixed_scales(module.graph, [IMAGES]) == []
    reasons = dict(module.skipped)
    assert "3 of 7 channels" in reasons["cat"] and "cat" in module.left_float


def report_and_float(model: nn.Module, sound: Tensor, axis: int, folder: Path) -> tuple[Any, Any, Any]:
    """Returns the mean SNR (dB) if mixed scales are only reported, that if they are left float, and its module."""
    exact = model(sound).detach().numpy()
    before, after = folder / "before.onnx", folder / "after.onnx"
    shipped(model, sound, before, "report")
    module = shipped(model, sound, after)
    lost, kept = (decibel(exact, run(path, sound), axis).mean() for path in (before, after))
    return lost, kept, module


def test_the_filters_of_a_logarithm_stay_float(tmp_path: Path) -> None:
    loudness = torch.logspace(-3, 0, 32)[:, None, None]
    lost, kept, module = report_and_float(FrontEnd(), noise(32, 1, 512) * loudness, 1, tmp_path)
    assert kept > 25 > lost + 10
    assert module.floats == ["filters"]


def test_bands_before_a_logarithm_are_looked_at_behind_it(tmp_path: Path) -> None:
    lost, kept, module = report_and_float(Spectrum(), noise(32, 1, 512), 2, tmp_path)
    assert kept > 25 > lost + 25
    assert {"square", "bands"} <= {*module.floats} and "head" not in module.floats


@pytest.mark.parametrize(
    "name", ["resnet18", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mobilenet_v2", "vit"))]
)
def test_classifiers_keep_their_bytes(name: str, tmp_path: Path) -> None:
    model = small_vit() if name == "vit" else build(name, 32)
    images, digests = noise(32, 3, 32, 32), set()
    for mixed in ("float", "report"):
        module = shipped(model, images, tmp_path / "model.onnx", mixed)
        assert not module.mixed
        digests.add(hashlib.sha256((tmp_path / "model.onnx").read_bytes()).hexdigest())
    assert len(digests) == 1


def test_an_override_has_the_last_word(tmp_path: Path) -> None:
    overrides = {"cat": OverrideConfig(activation_dtype="uint8")}
    module = shipped(Detector(), IMAGES, tmp_path / "a.onnx", overrides=overrides)
    assert "cat" in {one.tensor for one in module.mixed} and "cat" not in module.floats


def test_corrections_stay_behind_the_change(tmp_path: Path) -> None:
    """The ranges and weights of operators that stay int8 must not change."""
    modules = [shipped(Detector(), IMAGES, tmp_path / "a.onnx", mixed) for mixed in ("float", "report")]
    states = [module.state_dict() for module in modules]
    assert states[0].keys() < states[1].keys()
    for name in ("graph.conv.weight", "graph.conv_quant.observer.high", "graph.boxes_quant.observer.low"):
        assert states[0][name].equal(states[1][name]), name
