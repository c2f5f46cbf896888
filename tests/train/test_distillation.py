"""Tests of distillation: losses against PyTorch's formulas, features of any architecture, and mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from chain import build, noise, settle
from clean_nets import drawn, save
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import Config, DataConfig, ModelConfig, ScheduleConfig
from qatkit.data import DataModule, digits
from qatkit.graph.phase import set_phase
from qatkit.run.loop.teacher import teacher_of
from qatkit.tasks import CLASSIFICATION
from qatkit.train.distillation import KEY
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

IMAGES, LABELS = noise(8, 3, 12, 12, seed=3), torch.arange(8) % 4


def test_soft_targets_of_segmentation_weigh_as_in_classification() -> None:
    """Checks that the loss is the mean over images and positions, as in cross entropy."""
    logits, target = noise(2, 5, 3, 4, seed=1), noise(2, 5, 3, 4, seed=2)
    p, q = (np.exp(one.numpy().astype(np.float64) / 3) for one in (target, logits))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    expected = 9 * (p * np.log(p / q)).sum(1).mean()
    assert float(CLASSIFICATION.distillation(logits, target, 3.0)) == pytest.approx(expected, rel=1e-5)
    flat = [one.permute(0, 2, 3, 1).reshape(-1, 5) for one in (logits, target)]
    assert float(CLASSIFICATION.distillation(flat[0], flat[1], 3.0)) == pytest.approx(expected, rel=1e-5)


class Student(nn.Module):
    """A model from [N, 3, 12, 12] to [N, 4] with a residual block, which ends in a ReLU."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, wide, 3), nn.BatchNorm2d(wide), nn.ReLU())
        self.block = Block(wide)
        self.fc = nn.Linear(wide, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc(self.block(self.stem(x)).mean((2, 3))))


class Block(nn.Module):
    """A residual block with one convolution."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, wide, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.conv(x))


class Teacher(nn.Module):
    """Another architecture, whose `body` has the output shape of the student's block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.body(x).mean((2, 3))))


def _module(schedule: ScheduleConfig, model: nn.Module | None = None) -> QATModule:
    torch.manual_seed(1)
    model = model or settle(Student(), 3, 12, 12)
    module = QATModule(model, noise(2, 3, 12, 12), schedule)
    module.calibrate([IMAGES])
    return module


@pytest.mark.parametrize(("distill", "weight"), [(0.0, 2.0), (0.3, 0.5), (1.0, 1.0)])
def test_the_loss_is_that_of_the_papers(distill: float, weight: float) -> None:
    schedule = ScheduleConfig(
        distill=distill, distill_temperature=3.0, distill_teacher="another", label_smoothing=0.1,
        distill_features=["block:body"], distill_feature_weight=weight,
    )  # fmt: skip
    model = cast(Student, settle(Student(), 3, 12, 12))
    module, teacher = _module(schedule, model), cast(Teacher, settle(Teacher(), 3, 12, 12))
    module.learn_from(model, teacher)
    set_phase(module.graph, observe=False, quantize=False)  # the graph computes what the model does
    stem = model.stem(IMAGES)
    ours, theirs = model.block(stem), teacher.body(IMAGES)
    logits, target = model(IMAGES), teacher(IMAGES)
    hard = F.cross_entropy(logits, LABELS, label_smoothing=0.1)
    soft = F.kl_div(F.log_softmax(logits / 3, 1), F.softmax(target / 3, 1), reduction="batchmean")
    feature = F.mse_loss(ours, theirs) / F.mse_loss(theirs, torch.zeros_like(theirs))
    wanted = (1 - distill) * hard + distill * 9 * soft + weight * feature
    found = module.loss(IMAGES, LABELS)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not any(name.startswith(("body", "head")) for name, _ in module.named_parameters())
    found.backward()
    for name, parameter in model.named_parameters():  # those of the stem are folded
        if name.startswith(("block", "fc")):
            (gradient,) = torch.autograd.grad(wanted, parameter, retain_graph=True, allow_unused=True)
            own = module.graph.get_parameter(name).grad
            if gradient is not None:
                torch.testing.assert_close(own, gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("ours", [False, True], ids=["apart", "in_place"])
@pytest.mark.parametrize("theirs", [False, True], ids=["apart", "in_place"])
def test_a_feature_is_unchanged_by_later_in_place_operators(ours: bool, theirs: bool) -> None:
    class Net(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.conv, self.relu, self.fc = nn.Conv2d(3, 8, 3), nn.ReLU(in_place), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.fc(self.relu(self.conv(x)).mean((2, 3))))

    model, teacher = settle(Net(ours), 3, 12, 12), Net(theirs).eval()
    teacher.load_state_dict(model.state_dict())
    schedule = ScheduleConfig(
        distill_features=["conv"], distill_teacher="another", distill_feature_weight=1e3
    )
    module = _module(schedule, model)
    module.learn_from(model, teacher)
    set_phase(module.graph, observe=False, quantize=False)
    torch.testing.assert_close(module.loss(IMAGES, LABELS), F.cross_entropy(model(IMAGES), LABELS))


def test_several_features_weigh_alike() -> None:
    schedule = ScheduleConfig(distill_features=["stem", "block"], distill_teacher="another")
    model = cast(Student, settle(Student(), 3, 12, 12))
    module, teacher = _module(schedule, model), cast(Student, settle(Student(), 3, 12, 12, seed=5))
    module.learn_from(model, teacher)
    set_phase(module.graph, observe=False, quantize=False)
    one, other = model.stem(IMAGES), teacher.stem(IMAGES)
    first = F.mse_loss(one, other) / other.square().mean()
    one, other = model.block(one), teacher.block(other)
    second = F.mse_loss(one, other) / other.square().mean()
    wanted = F.cross_entropy(model(IMAGES), LABELS) + (first + second) / 2
    torch.testing.assert_close(module.loss(IMAGES, LABELS), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("resnet18", ["maxpool", "layer1", "layer2.0", "layer4", "avgpool"]),
        *(
            pytest.param(name, paths, marks=pytest.mark.slow)
            for name, paths in {
                "mobilenet_v2": ["features.0", "features.3", "features.3.conv", "features.18"],
                "mobilenet_v3_small": ["features.1", "features.4", "features.12", "classifier.1"],
                "efficientnet_b0": ["features.2", "features.5.0", "features.8"],
                "densenet121": ["features.denseblock1", "features.transition2"],
                "convnext_tiny": ["features.1.0", "features.3"],
                "swin_t": ["features.1.0", "features.5"],
            }.items()
        ),
    ],
)
def test_float_features_cost_nothing_with_quantization_off(name: str, paths: list[str]) -> None:
    """Compares the unquantized student with its float model: every feature is found, and none differs."""
    model = build(name, 64)
    module = QATModule(
        model, noise(2, 3, 64, 64), ScheduleConfig(distill_features=paths, batch_norm="freeze")
    )
    assert [feature.ours for feature in module.features] == paths
    module.eval()
    set_phase(module.graph, observe=False, quantize=False)
    images = noise(4, 3, 64, 64, seed=9)
    outputs, features = module._with_features(images)
    torch.testing.assert_close(outputs, module(images))
    wanted = dict[str, Tensor]()
    for path in paths:
        keep = lambda _, __, output, path=path: wanted.__setitem__(path, output)  # noqa: E731
        model.get_submodule(path).register_forward_hook(keep)
    model(images)
    for path, feature in zip(paths, features, strict=True):
        assert (feature - wanted[path]).abs().max() < 1e-4 * wanted[path].abs().max()


def test_a_module_that_was_given_no_teacher_says_so() -> None:
    module = _module(ScheduleConfig(distill=0.5, distill_teacher="resnet50"))
    with pytest.raises(
        ConfigError, match=r"schedule.distill_teacher=resnet50: distillation needs a teacher; pass it to"
    ):
        module.loss(IMAGES, LABELS)


@pytest.mark.parametrize(
    ("feature", "says"),
    [
        ("blok", r"blok: expected a module of the model \(did you mean block"),
        ("block:bdy", r"bdy: expected a module of the teacher \(did you mean body"),
        (
            "fc:body",
            r"fc:body: expected modules whose outputs have the same shape; fc returns \[4\] and the teacher's body",
        ),
        ("stem.0", "stem.0: expected a module whose output the quantized graph computes"),
        ("idle", "idle: expected a module that the model calls"),
    ],
)
def test_a_feature_that_can_not_be_learned_is_named(feature: str, says: str) -> None:
    model = cast(Student, settle(Student(), 3, 12, 12))
    model.add_module("idle", nn.ReLU())
    teacher: nn.Module = settle(Teacher(), 3, 12, 12) if ":" in feature else model
    module = _module(ScheduleConfig(distill_features=[feature], distill_teacher="another"), model)
    with pytest.raises(ConfigError, match=says) as caught:
        module.learn_from(model, teacher)
    assert caught.value.key == KEY


@pytest.mark.parametrize("batch_norm", ["fold", "freeze"])
def test_a_folded_conv_is_refused_as_a_feature_before_training(batch_norm: str) -> None:
    """An untrained BatchNorm is the identity, so equal outputs cannot tell a Conv from its BatchNorm."""
    schedule = ScheduleConfig(distill_features=["stem.0"], batch_norm=batch_norm)
    with pytest.raises(
        ConfigError, match=r"stem.0: expected a module whose output the quantized graph computes"
    ):
        QATModule(Student().eval(), noise(2, 3, 12, 12), schedule)
    module = QATModule(Student().eval(), noise(2, 3, 12, 12), replace(schedule, distill_features=["stem.1"]))
    assert module.features[0].node in {node.name for node in module.graph.graph.nodes}


def five_classes() -> nn.Module:
    """Returns a user's teacher with 5 classes instead of the digits' 10."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(5))


def of_another_size() -> nn.Module:
    """Returns a teacher that fails on images of 8 x 8 pixels."""
    return nn.Sequential(nn.Conv2d(3, 10, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def ten_classes() -> nn.Module:
    """Returns a suitable teacher."""
    return nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _config(**schedule: object) -> Config:
    config = Config(data=DataConfig(image_size=8, workers=0), model=ModelConfig("resnet18"))
    return replace(config, schedule=ScheduleConfig(distill=0.5, **schedule))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (
            {"distill_teacher": "resnet50"},
            "schedule.distill_teacher=resnet50: expected a teacher with the 10 classes of the data; "
            "the given one has 1000",
        ),
        (
            {"distill_teacher": f"{__name__}.five_classes"},
            "a teacher with the 10 classes of the data; the given one has 5",
        ),
        (
            {"distill_teacher": f"{__name__}.of_another_size"},
            "the teacher failed on images [N, 3, 8, 8], as data.image_size",
        ),
        (
            {"distill_teacher": "resnet5"},
            "schedule.distill_teacher=resnet5: expected a torchvision model or a dotted path",
        ),
        (
            {"distill_checkpoint": "absent.pt"},
            "schedule.distill_checkpoint=absent.pt: expected an existing file",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_one_line(schedule: dict[str, str], says: str) -> None:
    config = _config(**schedule)
    with pytest.raises(ConfigError) as caught:
        teacher_of(config, DataModule(config.data, digits, 0))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_teacher_from_a_checkpoint_and_one_of_a_builder(tmp_path: str) -> None:
    config = _config()
    data = DataModule(config.data, digits, 0)
    assert teacher_of(config, data) is None
    stored = build("resnet18", 32)
    torch.save(stored.state_dict(), f"{tmp_path}/teacher.pt")
    images = noise(2, 3, 8, 8)
    for schedule in (
        {"distill_checkpoint": f"{tmp_path}/teacher.pt"},
        {"distill_checkpoint": f"{tmp_path}/teacher.pt", "distill_teacher": "resnet18"},
    ):
        teacher = teacher_of(_config(**schedule), data)
        assert teacher is not None
        torch.testing.assert_close(teacher(images), stored(images))
    own = teacher_of(_config(distill_teacher=f"{__name__}.ten_classes"), data)
    assert own is not None and own(images).shape == (2, 10)
    with pytest.raises(ConfigError, match=r"schedule.distill_checkpoint=.*a checkpoint of mobilenet_v2"):
        teacher_of(_config(distill_checkpoint=f"{tmp_path}/teacher.pt", distill_teacher="mobilenet_v2"), data)


def test_an_onnx_file_teaches_with_its_own_weights(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> agraph (float[N, 3, 8, 8] image) => (float[N, 10] logits)
    { rows = Flatten (image) logits = MatMul (rows, w) }"""
    save(tmp_path / "teacher.onnx", text, {"w": drawn(192, 10)})
    config = _config(distill_teacher=f"onnx/{tmp_path}/teacher.onnx")
    teacher = teacher_of(config, DataModule(config.data, digits, 0))
    assert teacher is not None and teacher(noise(2, 3, 8, 8)).shape == (2, 10)
