"""Tests of mistakes that a run refuses: in one line, before any training, and without leaving a file."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_run import Net, sha256, tiny
from torch import Tensor

from qatkit.config.schema import Config, ModelConfig, OverrideConfig, ScheduleConfig
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.run.loop import fit
from qatkit_verify.errors import ConfigError


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a successful run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert pipeline.train(tiny(folder)) == 0
    return folder


class Untraceable(Net):
    """A network whose control flow depends on a tensor's value."""

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = -x
        return super().forward(x)


class Frozen(Net):
    """A network without trainable parameters, as builders for inference return it."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(num_classes)
        self.requires_grad_(False)


class Unexportable(Net):
    """A network that traces and runs but has an operator that ONNX lacks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + cast(Tensor, torch.special.bessel_j0(x)).mean()


def _with(**parts: dict[str, Any]) -> Callable[[Config], Config]:
    """Returns a function that changes the tiny configuration, such as `_with(data={"root": "x"})`."""

    def change(config: Config) -> Config:
        groups: dict[str, Any] = {}
        for name, values in parts.items():
            group = getattr(config, name)
            groups[name] = group | values if isinstance(group, dict) else replace(group, **values)
        return replace(config, **groups)

    return change


MISTAKES = {
    "backend": (
        _with(backend={"target": "qatkit.quant.backends.FBGEM"}),
        "backend.target=qatkit.quant.backends.FBGEM: expected a name in qatkit.quant.backends .did you mean FBGEMM",
    ),
    "no backend": (
        _with(backend={"target": "qatkit.quant.backends.dataclass"}),
        "backend.target=qatkit.quant.backends.dataclass: expected the dotted path of a qatkit.quant.backends.Backend",
    ),
    "classes": (
        _with(model={"num_classes": 7}),
        "model.num_classes=7: expected null or 10, the number of classes",
    ),
    "model": (
        _with(model={"name": "resnt18"}),
        "model.name=resnt18: expected a torchvision model or a dotted path",
    ),
    "nothing trains": (
        _with(model={"name": f"{__name__}.Frozen"}),
        "model.name=test_pipeline_refusals.Frozen: "
        "expected a model with trainable parameters; all parameters of this model have requires_grad=False",
    ),
    "untraceable": (
        _with(model={"name": f"{__name__}.Untraceable"}),
        r"model.name=Untraceable: "
        r"the model cannot be captured at .*test_pipeline_refusals.py:\d+ `if x.mean\(\) > 0:`: "
        r"the computation depends on values of a tensor \(bool\); ",
    ),
    "no images": (_with(calibration={"images": 0}), "calibration.images=0: "),
    "fewer images than a batch": (
        _with(calibration={"images": 32, "batch_size": 64}),
        "calibration.batch_size=64: expected at most 32, the number of calibration images",
    ),
    "less data than a batch": (
        _with(data={"train_images": 40, "batch_size": 8}, calibration={"images": 512, "batch_size": 64}),
        "calibration.batch_size=64: expected at most 40, the number of training images",
    ),
    "one channel for a model of three": (
        _with(data={"mean": [0.5], "std": [0.5]}),
        r"model.name=tiny_run.Net: "
        r"the model failed on images \[N, 1, 8, 8\], "
        r"as data.image_size and data.mean define them \(.*channels",
    ),
    "weights": (
        _with(calibration={"weights": "kl"}),
        r"calibration.weights=kl: expected one of auto, max, mse",
    ),
    "table of trained weights": (
        _with(export={"tensorrt_table": "8601"}),
        "schedule.epochs=1: expected 0 with export.tensorrt_table",
    ),
    "table of a release by its name": (
        _with(export={"tensorrt_table": "8.6.1"}),
        'export.tensorrt_table=8.6.1: expected the digits of a TensorRT release, such as "8601" for 8.6.1',
    ),
    "search without a histogram": (
        _with(calibration={"search": "tournament"}),
        "calibration.observer=qatkit.quant.observers.MovingAverageMinMaxObserver: "
        "expected an observer with a histogram",
    ),
    "no observer": (
        _with(calibration={"observer": "torch.nn.ReLU"}),
        "calibration.observer=torch.nn.ReLU: "
        "expected the dotted path of a class derived from qatkit.quant.observers.Observer",
    ),
    "half an observer": (
        _with(calibration={"observer": "qatkit.quant.observers.HistogramObserver"}),
        r"calibration.observer=.*: expected an observer without required arguments; this class needs method",
    ),
    "few images for a tournament": (
        _with(
            calibration={
                "search": "tournament",
                "images": 20,
                "batch_size": 10,
                "observer": "qatkit.quant.observers.MSEObserver",
            }
        ),
        "calibration.images=20: expected at least 32, since some of them are held out",
    ),
    "percentile beside a search": (
        _with(
            calibration={
                "search": "layerwise",
                "percentile": 60.0,
                "observer": "qatkit.quant.observers.PercentileObserver",
            }
        ),
        "calibration.percentile=60.0: expected null with calibration.search=layerwise, which tries its own",
    ),
    "cache in a file": (
        _with(calibration={"cache": f"{__file__}/cache"}),
        "calibration.cache=.*/cache: expected a file in a folder that can be written to",
    ),
    "correction of what is not trained": (
        _with(
            export={"mode": "dynamic"},
            schedule={"epochs": 0},
            algorithm={"equalize": {"target": "qatkit.algorithms.Equalize"}},
        ),
        "algorithm=equalize: expected none with export.mode=dynamic",
    ),
    "tournament of noise": (
        _with(
            calibration={
                "search": "tournament",
                "random": True,
                "observer": "qatkit.quant.observers.MSEObserver",
            }
        ),
        "calibration.random=true: expected false with calibration.search=tournament",
    ),
    "no root": (
        _with(data={"source": "qatkit.data.image_folder", "root": "/nowhere", "mean": [0.5], "std": [0.5]}),
        "data.root=/nowhere: expected a folder with train/CLASS",
    ),
    "source": (
        _with(data={"source": "qatkit.data.digit"}),
        "data.source=qatkit.data.digit: expected a name in",
    ),
    "batch": (
        _with(data={"batch_size": 5000}),
        "data.batch_size=5000: expected at most 1437, the number of training images",
    ),
    "override": (
        _with(backend={"overrides": {"layer9": OverrideConfig(float=True)}}),
        "backend.overrides.*layer9",
    ),
    "opset": (_with(export={"opset": 12}), "export.opset=12: expected an integer from 13"),
    "checkpoint": (
        _with(model={"checkpoint": "/nowhere.pt"}),
        "model.checkpoint=/nowhere.pt: expected an existing",
    ),
    "observer": (
        _with(calibration={"observer": "qatkit.quant.observers.Nothing"}),
        "calibration.observer=qatkit",
    ),
    "percentile": (
        _with(calibration={"percentile": 101.0}),
        "calibration.percentile=101.0: expected a number above 50, up to 100",
    ),
    "percentile of another observer": (
        _with(calibration={"observer": "qatkit.quant.observers.EntropyObserver", "percentile": 99.0}),
        "calibration.percentile=99.0: expected null with calibration.observer=qatkit.quant.observers.EntropyObserver",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the float training, which comes first, does not start either."""
    change, message = MISTAKES[case]
    monkeypatch.setattr(fit, "fit", never)

    with pytest.raises(ConfigError) as raised:
        pipeline.train(change(tiny(tmp_path / "run")))

    assert re.match(message, str(raised.value))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def never(*_: object, **__: object) -> None:
    pytest.fail("a training began although the configuration cannot work")


class Malice:
    """An object that runs code when a loader unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def damaged(path: Path, source: Path) -> None:
    path.write_bytes(source.read_bytes()[:-500])


def malicious(path: Path, source: Path) -> None:
    torch.save({**torch.load(source, weights_only=True), "loops": Malice(path.with_name("ran"))}, path)


def nonsense(path: Path, source: Path) -> None:
    path.write_bytes(pickle.dumps([1, 2, 3]))


BAD_FILES = {"damaged": damaged, "malicious": malicious, "nonsense": nonsense}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_float_checkpoint_is_refused(kind: str, finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    BAD_FILES[kind](path, finished / "float.ckpt")

    with pytest.raises(ConfigError, match=f"model.checkpoint={path}: ") as raised:
        pipeline.train(_with(model={"checkpoint": str(path)})(tiny(tmp_path / "run")))

    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_checkpoint_is_not_exported(kind: str, finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    BAD_FILES[kind](path, finished / "last.ckpt")

    with pytest.raises(ConfigError, match=f"checkpoint={path}: ") as raised:
        export_checkpoint.export(replace(tiny(tmp_path / "run"), checkpoint=str(path)))

    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_checkpoint_is_not_resumed(kind: str, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    config = tiny(folder)
    (folder / "config.yaml").write_bytes((finished / "config.yaml").read_bytes())
    (folder / "float.ckpt").write_bytes((finished / "float.ckpt").read_bytes())
    BAD_FILES[kind](folder / "last.ckpt", finished / "last.ckpt")

    with pytest.raises(ConfigError, match=f"resume={folder / 'last.ckpt'}: ") as raised:
        pipeline.train(replace(config, resume=str(folder / "last.ckpt")))

    assert "\n" not in str(raised.value)
    assert not (folder / "ran").exists()


def test_a_checkpoint_of_another_model_is_not_exported(finished: Path, tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", checkpoint=str(finished / "last.ckpt"))
    config.model.name = "resnet18"

    with pytest.raises(
        ConfigError, match=r"checkpoint=.*last\.ckpt: the checkpoint does not fit its config\.yaml"
    ) as raised:
        export_checkpoint.export(config)

    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(finished: Path) -> None:
    before = {path.name: sha256(path) for path in finished.iterdir()}

    with pytest.raises(ConfigError, match=r"output_dir=.*holds another run"):
        pipeline.train(tiny(finished))

    assert {path.name: sha256(path) for path in finished.iterdir()} == before


@pytest.mark.parametrize("made", ["another run", "a finished one"])
def test_resume_auto_does_not_continue_another_run(made: str, finished: Path, tmp_path: Path) -> None:
    """Checks a folder with a run of another learning rate, unfinished (without a report) or finished."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in finished.iterdir():
        if made == "a finished one" or path.name != "report.json":
            (folder / path.name).write_bytes(path.read_bytes())
    before = {path.name: sha256(path) for path in folder.iterdir()}
    schedule = ScheduleConfig(epochs=1, lr=0.5)

    with pytest.raises(ConfigError, match=r"output_dir=.*holds another run"):
        pipeline.train(tiny(folder, resume="auto", schedule=schedule))

    assert {path.name: sha256(path) for path in folder.iterdir()} == before


def test_a_model_that_cannot_be_exported_fails_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "fit", never)
    config = tiny(tmp_path / "run", model=ModelConfig(name=f"{__name__}.Unexportable"))

    with pytest.raises(ConfigError, match=r"model\.name=\w+: .*bessel_j0") as raised:
        pipeline.train(config)

    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()
