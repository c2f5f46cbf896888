"""Tests of a segmenter from training to the bundle, against ONNX Runtime and NumPy."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from labelled_pictures import folder
from PIL import Image
from tiny_run import report_of
from tiny_segmenter import TinySegmenter, asked
from torch import Tensor

from qatkit.jobs import export_checkpoint, pipeline
from qatkit.run.build import data_of
from qatkit_verify.command import main as verify_bundle
from qatkit_verify.errors import ConfigError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the folder of a run with float training and QAT, and the folder of its pictures."""
    top = tmp_path_factory.mktemp("segmenter")
    root = folder(top / "pictures", 48, 12)
    assert pipeline.train(asked(top / "run", root, "export.bundle=true")) == 0
    return top / "run", root


def test_metrics_are_those_of_the_file(made: tuple[Path, Path]) -> None:
    run, root = made
    report, data = report_of(run), data_of(asked(run, root))
    assert report["shortfalls"] == [] and report["classes"] == ["ground", "brick", "leaf"]
    for name in ("float", "int8"):
        session = ort.InferenceSession(run / f"model.{name}.onnx")
        pairs = [
            (session.run(None, {"input": x.numpy()})[0].argmax(1), y.numpy()) for x, y in data.test_batches()
        ]
        found, maps = (np.concatenate(one) for one in zip(*pairs, strict=True))
        counted = maps != 255
        shares = [
            ((found == c) & (maps == c)).sum() / (((found == c) & counted) | (maps == c)).sum()
            for c in range(3)
        ]
        scores = report["accuracy"][name]
        assert scores["miou"] == pytest.approx(100 * np.mean(shares))
        assert scores["pixel_accuracy"] == pytest.approx(100 * (found == maps)[counted].mean())
        assert scores["miou"] > 85
    assert report["fidelity"]["int8"]["agreement"] > 0.98


def test_the_page_shows_class_maps_where_files_differ_most(made: tuple[Path, Path]) -> None:
    run, root = made
    page, report, data = (run / "report.html").read_text(), report_of(run), data_of(asked(run, root))
    sessions = [ort.InferenceSession(run / f"model.{name}.onnx") for name in ("float", "int8")]
    every: list[Any] = []
    for images, maps in data.test_subset(64, 32):
        exact, found = (one.run(None, {"input": images.numpy()})[0].argmax(1) for one in sessions)
        every += zip(exact, found, maps.numpy(), images.numpy(), strict=True)
    shares = sorted(((a != b).mean() for a, b, _, _ in every), reverse=True)
    rows = report["examples"]["rows"]
    assert report["examples"]["looked_at"] == len(every) == 12
    assert [row["differs"] for row in rows] == pytest.approx(shares[:4])
    assert [one["title"] for one in rows[0]["panels"]] == [
        "picture",
        "truth",
        "float",
        "INT8",
        "where they differ",
    ]
    assert all(one["pixels"] == "" for row in rows for one in row["panels"])  # only the page has them

    exact, found, maps, image = max(every, key=lambda one: (one[0] != one[1]).mean())
    drawn = [
        Image.open(io.BytesIO(base64.b64decode(one)))
        for one in re.findall(r'<image href="data:image/\w+;base64,([^"]+)"', page)[:5]
    ]
    legend = dict(zip(("ground", "brick", "leaf", "unlabelled"), range(4), strict=True))
    colours = dict(report["examples"]["legend"])
    assert set(colours) == set(legend) and all(f"background:{one}" in page for one in colours.values())
    table = np.array([[*bytes.fromhex(colours[name][1:])] for name in legend], np.uint8)
    for panel, wanted in zip(drawn[1:4], (np.minimum(maps, 3), exact, found), strict=True):
        assert (np.asarray(panel.convert("RGB")) == table[wanted]).all()
    pixels = np.moveaxis(image, 0, -1) * data.config.std + np.asarray(data.config.mean)
    assert np.abs(np.asarray(drawn[0]) / 255 - pixels).mean() < 0.05  # compression loses a little
    assert (
        "IoU, INT8" in page
        and "brick" in page
        and "<script" not in page
        and "http" not in page.split("<main>")[0]
    )


def test_its_bundle_is_checked_without_torch(made: tuple[Path, Path]) -> None:
    bundle = made[0] / "bundle"
    assert verify_bundle([str(bundle), "--min-speedup", "0.01"]) == 0
    card = (bundle / "card.md").read_text()
    assert "pipeline_tag: image-segmentation" in card and "| brick |" in card
    assert json.loads((bundle / "manifest.json").read_text())["name"]


def test_an_aux_output_trains_and_is_in_no_file(made: tuple[Path, Path], tmp_path: Path) -> None:
    run, root = made
    for name in ("model.float.onnx", "model.int8.onnx"):
        graph = onnx.load(run / name).graph
        assert [one.name for one in graph.output] == ["output"]
        assert not [node.name for node in graph.node if "aux" in node.name]
    before = torch.load(run / "float.ckpt", weights_only=True)["state_dict"]
    after = torch.load(run / "last.ckpt", weights_only=True)["state_dict"]
    (float_key,), (key,) = ([one for one in state if one.endswith("aux.weight")] for state in (before, after))
    assert not torch.equal(before[float_key], after[key])
    again = asked(tmp_path / "again", root, f"checkpoint={run}/last.ckpt")
    assert export_checkpoint.export(again) == 0
    assert (tmp_path / "again" / "model.int8.onnx").read_bytes() == (run / "model.int8.onnx").read_bytes()


class AuxFirst(TinySegmenter):
    """A segmenter that returns its auxiliary logits first."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return dict(reversed(super().forward(x).items()))


class SmallAux(TinySegmenter):
    """A segmenter whose auxiliary logits have half the input's size."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(x) | {"aux": self.aux(self.first(x))}


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("AuxFirst", "expected a model that returns 'out' first and 'aux' last; the model returns aux, out"),
        (
            "SmallAux",
            "'aux', trained together with 'out', has shape [2, 3, 24, 32]; 'aux' has shape [2, 3, 12, 16]",
        ),
    ],
)
def test_auxiliary_outputs_that_cannot_train_are_refused(model: str, told: str, tmp_path: Path) -> None:
    config = asked(tmp_path / "run", folder(tmp_path / "pictures", 8, 4), f"model.name={__name__}.{model}")
    with pytest.raises(ConfigError, match=re.escape(told)):
        pipeline.train(config)


def test_labels_are_read_before_anything_long(tmp_path: Path) -> None:
    root = folder(tmp_path / "pictures", 8, 4)
    (root / "classes.txt").write_text("ground\nbrick\n")
    with pytest.raises(
        ConfigError, match=r"numbers from 0 to 1, one for each line of classes.txt; the number 2 occurs"
    ):
        pipeline.train(asked(tmp_path / "run", root))
    assert not (tmp_path / "run").exists()


class Coarse(TinySegmenter):
    """A segmenter whose logits have half the input's size."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.second(self.first(x)))


def test_logits_of_another_size_are_refused_early(tmp_path: Path) -> None:
    config = asked(tmp_path / "run", folder(tmp_path / "pictures", 8, 4), f"model.name={__name__}.Coarse")
    with pytest.raises(ConfigError, match=r"the height and width of the label maps \(24 x 32\), not 12 x 16"):
        pipeline.train(config)


@pytest.mark.slow
def test_torchvisions_segmenters_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    root = folder(tmp_path / "pictures", 8, 4, (64, 64))
    names = (
        "model.name=lraspp_mobilenet_v3_large",
        "data.image_size=64",
        "verify.audit=false",
        "verify.max_drop=100",
    )
    config = asked(tmp_path / "run", root, *names, "schedule.float_epochs=1", "verify.min_agreement=0.9")
    assert pipeline.train(config) == 0
    assert report_of(tmp_path / "run")["accuracy"]["int8"]["miou"] >= 0
