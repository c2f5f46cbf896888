"""Tests of models that cannot be traced as a whole: parts against ONNX Runtime, and refused scopes."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torchvision
from chain import noise
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from qatkit.train.parts import Parts
from qatkit.verify.audit import audit
from qatkit_verify.errors import ConfigError


class Backbone(nn.Module):
    """A backbone with a frozen BatchNorm that returns two named feature levels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), FrozenBatchNorm2d(8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.out_channels = 8
        nn.init.uniform_(self.bn.running_var, 0.5, 2.0)
        nn.init.normal_(self.bn.running_mean)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = torch.relu(self.bn(self.stem(x)))
        return OrderedDict(fine=fine, coarse=torch.relu(self.down(fine)))


class Head(nn.Module):
    """A head with a convolution that all levels share, followed by logic that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.unused = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()), nn.Conv2d(8, 8, 1)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        return [y[y.mean((1, 2, 3)) > 0] if len(y) > 1 else y for y in map(self.conv, features)]


class Detector(nn.Module):
    """A backbone with a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = Backbone(), Head()

    def forward(self, x: Tensor) -> list[Tensor]:
        return cast("list[Tensor]", self.head(list(self.backbone(x).values())))


SCOPE = ["backbone", "head.conv"]


def run(path: Path, x: Tensor, *, optimize: bool) -> list[Any]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [cast(Any, value) for value in session.run(None, {"input": x.numpy()})]


def check_files(parts: Parts, folder: Path) -> None:
    """Compares every part's file with the converted part, on the inputs that the model gave to the part."""
    converted = parts.convert()
    for path, file in parts.export(folder).items():
        found = audit(file)
        assert found.ok and found.int8_share == 1.0, found.problems
        x = parts.inputs[path]
        with torch.no_grad():
            result = converted.get_submodule(path)(x)
        expected = [result] if isinstance(result, Tensor) else list(result.values())
        for optimize in (False, True):
            for got, value in zip(run(file, x, optimize=optimize), expected, strict=True):
                np.testing.assert_allclose(got, value.numpy(), rtol=0, atol=1e-5 * float(value.abs().max()))


def test_parts_take_their_places_and_ship(tmp_path: Path) -> None:
    model, x = Detector().eval(), noise(4, 3, 16, 16)
    parts = Parts(model, SCOPE, x)
    parts.calibrate([x])
    assert parts.model.get_submodule("backbone").out_channels == 8
    with torch.no_grad():
        expected, simulated, converted = model(x), parts.model(x), parts.convert()(x)
    for a, b, c in zip(expected, simulated, converted, strict=True):
        assert (a - b).abs().max() < 0.03 * a.abs().max()
        torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-5)
    check_files(parts, tmp_path)
    session = ort.InferenceSession(str(tmp_path / "backbone.int8.onnx"))
    assert [o.name for o in session.get_outputs()] == ["fine", "coarse"]


class TwoLevels(nn.Module):
    """A model with one head for two levels, of which the second is scaled by `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.factor = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), factor

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.head(x), self.head(x * self.factor)]


def test_calls_with_ranges_far_apart_are_told() -> None:
    parts = Parts(TwoLevels(100.0), ["head"], noise(2, 3, 8, 8))
    assert parts.skipped == []
    with pytest.warns(UserWarning, match="head: one range serves 2 calls whose inputs differ 100-fold"):
        parts.calibrate([noise(2, 3, 8, 8), noise(2, 3, 8, 8, seed=1)])
    assert [path for path, _ in parts.skipped] == ["head"]


def test_calls_with_ranges_close_together_are_fine(recwarn: pytest.WarningsRecorder) -> None:
    parts = Parts(TwoLevels(4.0), ["head"], noise(2, 3, 8, 8))
    parts.calibrate([noise(2, 3, 8, 8), noise(2, 3, 8, 8, seed=1)])
    assert parts.skipped == [] and not [w for w in recwarn if "one range" in str(w.message)]


def test_parts_train_in_their_places() -> None:
    x = noise(4, 3, 16, 16)
    parts = Parts(Detector(), SCOPE, x)
    parts.calibrate([x])
    parts.model.train()
    cast(Tensor, sum(level.pow(2).sum() for level in parts.model(x))).backward()
    grads = {n: p.grad for n, p in parts.model.named_parameters() if p.requires_grad and "unused" not in n}
    assert len(grads) >= 6
    assert all(g is not None and g.any() for g in grads.values())


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        ([], "at least one"),
        (["backbon"], "did you mean backbone"),
        (["backbone", "backbone.stem"], "lies inside 'backbone'"),
        (["head.unused"], "the model does not call this submodule on the example input"),
        (["head"], r"must be tensors, not \(list\)"),
    ],
)
def test_scopes_that_cannot_be(scope: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Parts(Detector(), scope, noise(2, 3, 16, 16))
    assert error.value.key == "model.scope"


DETECTORS = {
    "ssdlite320_mobilenet_v3_large": ["backbone"],
    "ssd300_vgg16": ["backbone"],
    "retinanet_resnet50_fpn_v2": ["backbone", "head.classification_head.conv", "head.regression_head.conv"],
    "fcos_resnet50_fpn": ["backbone", "head.classification_head.conv", "head.regression_head.conv"],
    "fasterrcnn_mobilenet_v3_large_320_fpn": ["backbone", "rpn.head.conv", "roi_heads.box_head"],
    "maskrcnn_resnet50_fpn": ["backbone", "rpn.head.conv", "roi_heads.box_head", "roi_heads.mask_head"],
    "keypointrcnn_resnet50_fpn": [
        "backbone",
        "rpn.head.conv",
        "roi_heads.box_head",
        "roi_heads.keypoint_head",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DETECTORS)
def test_the_traced_parts_of_a_detector(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {} if name.startswith("ssd") else {"min_size": 96, "max_size": 96}
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, **sizes).eval()
    image = [torch.rand(3, 96, 96, generator=torch.Generator().manual_seed(1))]
    parts = Parts(model, DETECTORS[name], image)
    parts.calibrate([image])
    check_files(parts, tmp_path)
    assert set(parts.convert()(image)[0]) >= {"boxes", "scores", "labels"}


class Neck(nn.Module):
    """A part that takes a level and a vector, and returns named levels and a mean, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse, self.known = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 1), nn.Linear(4, 8)

    def forward(self, level: Tensor, known: Tensor, scale: float = 1.0) -> tuple[dict[str, Tensor], Tensor]:
        shift = self.known(known)[:, :, None, None]
        levels = {"fine": torch.relu(self.fine(level) + shift), "coarse": self.coarse(level) * scale}
        return levels, levels["fine"].mean((2, 3))


class WithNeck(nn.Module):
    """A model that calls its neck with positional and with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.neck = Neck()

    def forward(self, x: Tensor) -> Tensor:
        known = x.mean((2, 3))[:, [0, 1, 2, 0]]
        levels, mean = self.neck(x, known=known)
        again, _ = self.neck(known=known, level=x)
        result: Tensor = levels["fine"].sum() + again["coarse"].sum() + mean.sum()
        return result


def test_a_part_of_several_tensors_gives_what_it_gave(tmp_path: Path) -> None:
    x = noise(4, 3, 12, 12)
    model, parts = WithNeck(), Parts(WithNeck(), ["neck"], x)
    parts.calibrate([x])
    converted, known = parts.convert(), noise(4, 4, seed=3)
    with torch.no_grad():
        exact, found = model.neck(x, known), converted.get_submodule("neck")(x, known)
    assert isinstance(found, tuple) and list(found[0]) == ["fine", "coarse"]
    assert (found[0]["coarse"] - exact[0]["coarse"]).abs().max() < 0.05 * exact[0]["coarse"].abs().max()
    session = ort.InferenceSession(str(parts.export(tmp_path)["neck"]))
    assert [one.name for one in session.get_inputs()] == ["level", "known"]
    got = session.run(None, {"level": x[:3].numpy(), "known": known[:3].numpy()})
    for value, reference in zip(got, (*found[0].values(), found[1]), strict=True):
        np.testing.assert_allclose(
            value, reference[:3].numpy(), rtol=0, atol=1e-5 * float(reference.abs().max())
        )
