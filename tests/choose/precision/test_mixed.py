"""Tests of precision=auto in whole runs: the worst layer becomes float first; the checkpoint stores the choice.

Times are made up (1 ms, and 0.3 ms more per float operator), because a network of this size is too fast for
the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from tiny_run import BUNDLE, calibrate_only, logits, report_of, sha256
from torch import Tensor, nn

from qatkit import models
from qatkit.choose.precision import mixed
from qatkit.choose.precision.chosen import chosen_floats
from qatkit.choose.precision.layout import Layout
from qatkit.choose.precision.mixtures import Builder
from qatkit.choose.precision.search import Search, meets, shown_points
from qatkit.choose.ranges import Calibrated, calibrate_module, check_cache, splits
from qatkit.config.rules import validate
from qatkit.config.schema import (
    Config,
    ExportConfig,
    OverrideConfig,
    PrecisionConfig,
    RescueConfig,
    TargetConfig,
)
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.quant.qat_layers import QATConv2d
from qatkit.records.precision import PrecisionPoint
from qatkit.run.build import data_of, example_batch, qat_module
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

COUNT = 5


class Chain(nn.Module):
    """Four convolutions and a classifier; `searching` gives conv2 int3 weights with one scale per tensor."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.conv3, self.conv4 = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = torch.relu(conv(x))
        return cast(Tensor, self.fc(self.pool(x).flatten(1)))


@dataclass
class Counted:
    """A replacement for `Costs` with the made-up times."""

    def __call__(self, layout: Layout) -> float:
        return 1 + 0.3 * len(layout.floats)

    def share(self, layout: Layout) -> float:
        return len(layout.floats) / COUNT

    def learn(self, files: Sequence[tuple[Layout, float]]) -> None:
        """Checks that there is nothing to correct."""
        assert all(ms == pytest.approx(self(layout)) for layout, ms in files)


def float_operators(path: Path) -> int:
    """Returns the number of Convs and matrix products whose weight is not dequantized."""
    graph = ir.load(path).graph
    matrices = [node for node in graph if node.op_type in ("Conv", "Gemm", "MatMul")]
    made = [node.inputs[1].producer() for node in matrices if node.inputs[1] is not None]
    return sum(one is None or one.op_type != "DequantizeLinear" for one in made)


class TimedByCount(Search):
    """A search with the made-up times."""

    def costs(self):  # type: ignore[no-untyped-def]
        _, times = super().costs()  # writes the files
        return Counted(), times

    def clock(self, files: dict[str, Path]) -> dict[str, float]:
        return {name: 1 + 0.3 * float_operators(path) for name, path in files.items()}


def searching(folder: Path, **target: float) -> Config:
    config = calibrate_only(folder)
    config.model.name = f"{__name__}.Chain"
    config.calibration = replace(config.calibration, images=128, weights="max")
    config.backend.overrides = {"conv2": OverrideConfig(weight_dtype="int3", weight_granularity="per_tensor")}
    return replace(config, precision=PrecisionConfig(search="auto", points=6), target=TargetConfig(**target))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = searching(tmp_path_factory.mktemp("mixed") / "run", min_speedup=1.8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed, "Search", TimedByCount)
        assert pipeline.train(config) == 0
    return config


def folder_of(config: Config) -> Path:
    assert config.output_dir is not None
    return Path(config.output_dir)


def test_the_bad_layer_is_left_float_first(finished: Config) -> None:
    """1.3 ms is 1.92 times as fast as float (2.5 ms): one float operator is allowed, and it must be conv2."""
    front = report_of(folder_of(finished))["precision"]
    points = front["points"]
    assert [point["floats"] for point in points][:2] == [[], ["conv2"]]
    chosen = next(point for point in points if point["chosen"])
    assert chosen["floats"] == ["conv2"] and chosen["sqnr_db"] > points[0]["sqnr_db"] + 3
    assert chosen["ms"] == pytest.approx(1.3) and chosen["predicted_ms"] == pytest.approx(1.3)
    assert points[-1]["floats"] is None and points[-1]["sqnr_db"] is None
    assert front["operators"] == COUNT and front["images"] == 32


def test_no_point_that_is_shown_is_beaten(finished: Config) -> None:
    points = report_of(folder_of(finished))["precision"]["points"]
    signal = [np.inf if point["sqnr_db"] is None else point["sqnr_db"] for point in points]
    assert [point["number"] for point in points] == list(range(len(points))) and len(points) > 3
    assert (np.diff([point["ms"] for point in points]) > 0).all() and (np.diff(signal) > 0).all()


def test_figures_are_those_of_the_file_on_held_out_images(finished: Config) -> None:
    folder, data = folder_of(finished), data_of(finished)
    seen, held_out = splits(data, finished)
    assert not set(seen) & set(held_out)
    images = np.concatenate([part.numpy() for part, _ in data.image_batches(held_out, 32)])
    exact, found = (
        logits(folder / f"model.{name}.onnx", images).astype(np.float64) for name in ("float", "int8")
    )
    size = np.square(exact - exact.mean(1, keepdims=True)).mean()
    chosen = next(point for point in report_of(folder)["precision"]["points"] if point["chosen"])
    assert chosen["sqnr_db"] == pytest.approx(
        -10 * np.log10(np.square(found - exact).mean() / size), abs=1e-3
    )
    assert float_operators(folder / "model.int8.onnx") == 1


def test_the_page_and_the_table_have_the_front(finished: Config, capsys: pytest.CaptureFixture[str]) -> None:
    page = (folder_of(finished) / "report.html").read_text()
    assert f"precision.front={folder_of(finished)} precision.point=1" in page and 'class="pin chosen"' in page
    skipped = dict(map(tuple, report_of(folder_of(finished))["skipped"]))
    assert skipped["conv2"] == "float by override 'conv2'"


def test_the_checkpoint_knows_what_was_chosen(finished: Config, tmp_path: Path) -> None:
    """Exporting again gives the same bytes; a resumed run reports the same and does not search."""
    folder = folder_of(finished)
    again = replace(finished, checkpoint=str(folder / "last.ckpt"), output_dir=str(tmp_path / "again"))
    assert export_checkpoint.export(again) == 0
    assert sha256(tmp_path / "again" / "model.int8.onnx") == sha256(folder / "model.int8.onnx")
    before, file = report_of(folder), sha256(folder / "model.int8.onnx")
    (folder / "report.json").unlink()
    assert pipeline.train(replace(finished, resume=str(folder / "last.ckpt"))) == 0
    after = report_of(folder)
    assert sha256(folder / "model.int8.onnx") == file
    for key in ("precision", "skipped", "accuracy"):
        assert after[key] == before[key]


def test_any_point_is_built_by_its_number(finished: Config, tmp_path: Path) -> None:
    """The run writes a whole bundle with the float operators of this point."""
    points = report_of(folder_of(finished))["precision"]["points"]
    point = points[2]
    asked = PrecisionConfig(front=str(folder_of(finished)), point=2)
    config = replace(finished, output_dir=str(tmp_path / "run"), precision=asked, target=TargetConfig())
    validate(config)
    assert pipeline.train(config) == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} >= BUNDLE
    assert float_operators(tmp_path / "run" / "model.int8.onnx") == len(point["floats"])
    left = {
        site for site, why in report_of(tmp_path / "run")["skipped"] if why.startswith("float by override")
    }
    assert left == set(point["floats"]) and report_of(tmp_path / "run")["precision"] is None
    again = replace(
        config, checkpoint=str(tmp_path / "run" / "last.ckpt"), output_dir=str(tmp_path / "again")
    )
    assert export_checkpoint.export(again) == 0
    assert sha256(tmp_path / "again" / "model.int8.onnx") == sha256(tmp_path / "run" / "model.int8.onnx")


def point(top1: float | None, agreement: float, ms: float = 1.0) -> PrecisionPoint:
    return PrecisionPoint(0, ("a",), 1, ms, ms, 1.0, top1, agreement, 20.0)


def test_target_is_top1_with_labels_and_agreement_without() -> None:
    target = TargetConfig(max_drop=0.2, min_agreement=0.95)
    assert meets(point(78.3, 0.5), point(78.5, 1.0), target)  # slightly more than 0.2 in floating point
    assert not meets(point(78.2, 0.99), point(78.5, 1.0), target)
    assert meets(point(None, 0.95), point(None, 1.0), target)
    assert not meets(point(None, 0.94), point(None, 1.0), target)


def test_a_beaten_point_is_not_shown_but_both_ends_are() -> None:
    """The slowest point is shown although the float file is faster and exact, because its own file is smaller."""
    points = [point(70.0, 0.9, ms) for ms in (1.0, 2.0, 3.0, 2.5)]
    int8, exact = replace(points[0], floats=(), ms=1.5), replace(points[0], floats=None, ms=2.8)
    shown = shown_points([int8, *points, exact], [9.0, 8.0, 5.0, 1.0, 6.0, 0.0])
    assert [(one.number, one.ms) for one in shown] == [(0, 1.0), (1, 1.5), (2, 2.0), (3, 2.8), (4, 3.0)]


@torch.no_grad()
def test_int8_layers_keep_corrections_and_float_ones_are_exact(tmp_path: Path) -> None:
    config = searching(tmp_path / "run")
    data = data_of(config)
    model = models.build(config.model, data.num_classes).eval()
    module = qat_module(config, model, data.inputs, QATModule)
    batches = [images for images, _ in data.calibration_batches(64, 32)]
    module.calibrate(batches)
    for name in ("conv2", "conv3"):
        operator = module.graph.get_submodule(name)
        assert isinstance(operator, QATConv2d) and operator.weight_fake_quant is not None
        fake = operator.weight_fake_quant
        up = torch.rand(operator.weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
        scale = fake.scale(operator.weight)
        fake.fix(scale, operator.weight, fake.below(operator.weight, scale) + up)
        assert operator.bias is not None
        fake.bias_shift = 0.01 * torch.ones_like(operator.bias)
        operator.bias += fake.bias_shift
    mixture = Builder(config, model, data, module, Calibrated()).module(["conv2"])
    exact, kept = mixture.graph.get_submodule("conv2"), mixture.graph.get_submodule("conv3")
    assert not isinstance(exact, QATConv2d)
    torch.testing.assert_close(exact.bias, model.conv2.bias, rtol=0, atol=1e-7)  # type: ignore[union-attr]
    assert torch.equal(cast(Tensor, exact.weight), cast(Tensor, model.conv2.weight))  # type: ignore[union-attr]
    before = module.graph.get_submodule("conv3").state_dict()
    assert kept.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())
    scales = {name: value for name, value in mixture.state_dict().items() if name.endswith("_quant.scale")}
    assert torch.equal(scales["graph.conv3_quant.scale"], module.state_dict()["graph.conv3_quant.scale"])


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"precision": PrecisionConfig(point=1)}, "precision.point"),
        ({"precision": PrecisionConfig(front="somewhere")}, "precision.front"),
        ({"precision": PrecisionConfig("auto", front="somewhere", point=1)}, "precision.front"),
        ({"target": TargetConfig(min_speedup=2.0)}, "target.min_speedup"),
        ({"precision": PrecisionConfig("auto"), "export": ExportConfig(mode="float16")}, "export.mode"),
        ({"precision": PrecisionConfig("auto", points=0)}, "precision.points"),
        ({"precision": PrecisionConfig("auto"), "rescue": RescueConfig(climb=True)}, "precision.search"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, object], key: str) -> None:
    config = calibrate_only(Path("anywhere"))
    with pytest.raises(ConfigError) as caught:
        validate(replace(config, **changes))  # type: ignore[arg-type]
    assert caught.value.key == key


def test_noise_chooses_nothing(tmp_path: Path) -> None:
    config = searching(tmp_path / "run")
    config.calibration.random = True
    with pytest.raises(ConfigError, match=r"calibration\.random"):
        validate(config)


def test_a_cache_of_all_images_is_refused_with_held_out_ones(tmp_path: Path) -> None:
    """The cached ranges come from all images, including the held-out ones that judge the front."""
    config = searching(tmp_path / "run")
    config.calibration.cache = str(tmp_path / "ranges.safetensors")
    plain = replace(config, precision=PrecisionConfig())
    data = data_of(plain)
    module = qat_module(plain, models.build(plain.model, 10), data.inputs, QATModule)
    calibrate_module(module, data, plain, example_batch(plain, data.inputs))
    check_cache(data, plain)
    with pytest.raises(ConfigError, match=r"precision\.search"):
        check_cache(data, config)


def test_a_front_that_is_none_and_a_point_that_is_not_there(finished: Config, tmp_path: Path) -> None:
    def asked(front: Path, point: int, **changes: object) -> Config:
        return replace(finished, precision=PrecisionConfig(front=str(front), point=point), **changes)  # type: ignore[arg-type]

    folder = folder_of(finished)
    with pytest.raises(ConfigError, match=r"precision\.front"):
        chosen_floats(asked(tmp_path, 1), None)
    with pytest.raises(ConfigError, match=r"precision\.point=99.*0 \(int8\), 1 \(1 float\)"):
        chosen_floats(asked(folder, 99), None)
    last = len(report_of(folder)["precision"]["points"]) - 1
    with pytest.raises(ConfigError, match="is the float model"):
        chosen_floats(asked(folder, last), None)
    other = replace(finished.model, name="resnet18")
    with pytest.raises(ConfigError, match="a front of resnet18"):
        chosen_floats(asked(folder, 1, model=other), None)


def test_a_backend_of_another_runtime_is_refused(tmp_path: Path) -> None:
    config = searching(tmp_path / "run")
    config.backend.target = "qatkit.quant.backends.TENSORRT"
    with pytest.raises(ConfigError, match=r"precision\.search"):
        pipeline.train(config)


def test_the_files_of_the_front_are_sound(finished: Config) -> None:
    onnx.checker.check_model(str(folder_of(finished) / "model.int8.onnx"))
