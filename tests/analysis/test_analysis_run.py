"""Tests of analyses within a run: report, page, pictures, terminal output, resume and rejected settings."""

from __future__ import annotations

import dataclasses
import json
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sklearn.datasets import load_digits
from tiny_run import calibrate_only, digits_test, logits, report_of, tiny, top

from qatkit.analysis import sensitivity
from qatkit.analysis.outputs import Sums
from qatkit.config.rules import validate
from qatkit.config.schema import AnalysisConfig, Config, ExportConfig, ScheduleConfig
from qatkit.jobs import pipeline
from qatkit.records.analysis import (
    ALL_BUT,
    ONLY,
    Analysis,
    ClassRow,
    Comparison,
    Difference,
    Histogram,
    Isolation,
    Outcome,
    SensitivityRow,
    TensorRow,
)
from qatkit.records.results import Results
from qatkit.report import plain_report, render_page
from qatkit.report.pictures import draw
from qatkit_verify.errors import ConfigError

FULL = AnalysisConfig(isolation=True, sensitivity="exact", top=3, images=400, tensors=5, pictures=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a complete run with every analysis enabled."""
    folder = tmp_path_factory.mktemp("analysis") / "run"
    assert pipeline.train(tiny(folder, analysis=FULL)) == 0
    return folder


def test_the_report_has_every_part(finished: Path) -> None:
    found = report_of(finished)["analysis"]
    images, labels = digits_test()
    outcomes = found["isolation"]["outcomes"]
    assert list(outcomes) == ["float", "weights", "activations", "both", "int8"]
    wanted = top(logits(finished / "model.int8.onnx", images), labels, 1)
    assert outcomes["int8"]["top1"] == pytest.approx(wanted) and outcomes["int8"]["images"] == 360
    assert outcomes["both"]["top1"] == report_of(finished)["accuracy"]["simulated"]["top1"]
    assert sum(row["images"] for row in found["isolation"]["classes"]) == 360
    keys = [(row["site"], row["kind"]) for row in found["sensitivity"]]
    assert len(keys) == 6 and [row["direction"] for row in found["sensitivity"]] == [ONLY] * 3 + [ALL_BUT] * 3
    best = sorted(found["estimate"], key=lambda row: -row["loss"])[:3]
    assert {(row["site"], row["kind"]) for row in best} == set(keys)
    rows = found["comparison"]["rows"]
    assert [row["site"] for row in rows if row["kind"] == "weight"] == ["conv1", "conv2", "fc"]
    assert all(row["runtime"]["mse"] == pytest.approx(row["simulated"]["mse"], rel=1e-2) for row in rows
               if row["kind"] == "activation")  # fmt: skip
    assert found["comparison"]["first"] is None and found["comparison"]["images"] == 5
    assert sum(row["histogram"] is not None for row in rows) == 2
    assert set(found["seconds"]) == {"isolation", "estimate", "sensitivity", "tensors"}
    assert report_of(finished)["timings"]["analysis"] > 0


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_draws_without_a_script(finished: Path) -> None:
    page = _Page((finished / "report.html").read_text())
    kinds = [attrs.get("class") for tag, attrs in page.tags if tag == "svg"]
    assert kinds.count("histogram-svg") == 2 and "lines-svg" in kinds and kinds.count("bar-svg") == 3
    assert not any(tag in ("script", "img", "link") for tag, _ in page.tags)


def test_pictures_are_files(finished: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report_of(finished)["analysis"]["pictures"]
    assert found == [f"pictures/{name}.png" for name in ("sensitivity", "sqnr", "histograms")]
    for name in found:
        with Image.open(finished / name) as picture:
            assert picture.format == "PNG" and picture.width > 600


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_analysis_goes_on(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after two batches of the sensitivity, the run measures only the others, with equal results."""
    folder = tmp_path / "run"
    config = tiny(folder, analysis=FULL)
    measured: list[int] = []
    add = sensitivity._Measured.add

    def counted(self: Any, inputs: Any, labels: Any) -> None:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(len(inputs))
        add(self, inputs, labels)

    monkeypatch.setattr(sensitivity._Measured, "add", counted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.train(config)
    assert json.loads((folder / "sensitivity.json").read_text())["batches"] == 2
    assert not (folder / "report.json").exists()

    later: list[int] = []

    def followed(self: Any, inputs: Any, labels: Any) -> None:
        later.append(len(inputs))
        add(self, inputs, labels)

    monkeypatch.setattr(sensitivity._Measured, "add", followed)
    assert pipeline.train(dataclasses.replace(config, resume=str(folder / "last.ckpt"))) == 0
    assert sum(measured) + sum(later) == 360
    assert report_of(folder)["analysis"]["sensitivity"] == report_of(finished)["analysis"]["sensitivity"]


@pytest.mark.slow
def test_pictures_without_labels_are_told_apart_by_agreement(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    root.mkdir()
    for index, image in enumerate(load_digits().images[:80]):
        Image.fromarray((image * 255 / 16).astype("uint8")).save(root / f"{index:03}.png")
    config = calibrate_only(tmp_path / "run")
    config.data.source, config.data.root = "qatkit.data.pictures", str(root)
    config.data.mean, config.data.std = [0.5] * 3, [0.5] * 3
    config.calibration.batch_size, config.calibration.images = 20, 40
    config.verify.min_float_agreement = config.verify.max_float_kl = config.verify.min_float_sqnr = None
    config.analysis = AnalysisConfig(isolation=True, sensitivity="estimate", images=40, batch_size=16)
    pipeline.train(config)
    found = report_of(tmp_path / "run")["analysis"]
    assert not found["labelled"] and found["isolation"]["classes"] == []
    assert found["isolation"]["outcomes"]["both"]["top1"] is None
    assert found["isolation"]["outcomes"]["both"]["images"] == 40
    assert "of float's top-1" in found["isolation"]["advice"]
    assert "Judged without labels" in (tmp_path / "run" / "report.html").read_text()
    assert found["sensitivity"] == [] and all(row["loss"] >= 0 for row in found["estimate"])


def test_a_layer_that_is_not_there_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", analysis=AnalysisConfig(sensitivity="estimate", layers=["conv3"]))
    with pytest.raises(
        ConfigError, match=r"analysis\.layers=conv3: the pattern matches no .*did you mean conv[12], conv[12]"
    ):
        pipeline.train(config)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            AnalysisConfig(isolation=True),
            r"analysis\.isolation=true: expected false with export\.mode=dynamic",
        ),
        (
            AnalysisConfig(sensitivity="exact"),
            r"analysis\.sensitivity=exact: expected none with export\.mode=dynamic",
        ),
        (AnalysisConfig(tensors=4), r"analysis\.tensors=4: expected 0 with export\.mode=dynamic"),
        (
            AnalysisConfig(sensitivity="some"),
            r"analysis\.sensitivity=some: expected one of none, estimate, exact",
        ),
        (AnalysisConfig(top=0), r"analysis\.top=0: expected an integer of at least 1"),
    ],
)
def test_what_cannot_be_analysed_is_refused(asked: AnalysisConfig, message: str) -> None:
    export = ExportConfig(mode="dynamic")
    with pytest.raises(ConfigError, match=message):
        validate(Config(analysis=asked, export=export, schedule=ScheduleConfig(epochs=0)))


def _difference(sqnr: float) -> Difference:
    return Difference(1e-3, sqnr, 0.999, 0.1, 0.01)


def _results(config: dict[str, Any], found: Analysis) -> Results:
    return Results("demo", "resnet18", "outputs/demo", analysis=found, config=config)


HISTOGRAM = Histogram(-1.0, 1.0, [1, 5, 2, 0], [1, 4, 3, 0], -1.2, 1.1)
FOUND = Analysis(
    isolation=Isolation(
        {
            "float": Outcome(100, 80.0, 1.0, 0.0, 0.7, None),
            "weights": Outcome(100, 79.0, 0.99, 1e-3, 0.7, 30.0),
            "activations": Outcome(100, 70.0, 0.9, 1e-1, 0.8, 10.0),
            "both": Outcome(100, 69.0, 0.89, 1.1e-1, 0.8, 9.9),
        },
        [ClassRow("cat <1>", 10, 90.0, 50.0), ClassRow("dog", 10, 90.0, 90.0)],
        "only weights quantized: 1.00 points lost (30.0 dB); only activations quantized: 10.00 points lost (10.0 dB); "
        "most of the outputs' error comes from the activations",
    ),
    sensitivity=[
        SensitivityRow("a", "weight", ONLY, 80.0, 1e-3, 30.0, 1.0, 0.7),
        SensitivityRow("b", "activation", ONLY, 79.0, 2e-1, 10.0, 1.0, 0.7),
        SensitivityRow("a", "weight", ALL_BUT, 69.0, 1e-1, 30.0, 1.0, 0.7),
        SensitivityRow("b", "activation", ALL_BUT, 80.0, 1e-3, 10.0, 1.0, 0.7),
    ],
    estimate=[SensitivityRow("a", "weight", ONLY, None, 1e-3, None, exact=False)],
    comparison=Comparison(
        8,
        [
            TensorRow("in", "activation", _difference(40), _difference(40), None, 0.0, 1.0, 0.0),
            TensorRow("b", "activation", _difference(9), _difference(8), None, 0.0, 0.26, 12.1, HISTOGRAM),
        ],
        "activation b",
        "'b_quant/QuantizeLinear_output' of 'b/Conv': 90 % of its values differ, by up to 7 steps",
    ),
)


def test_the_terminal_says_what_was_found() -> None:
    config = {
        "calibration": {"search": "none", "weights": "max"},
        "algorithm": {},
        "backend": {"overrides": {}},
    }
    text = plain_report(_results(config, FOUND))
    assert "isolation on 100 images" in text and "activations quantized" in text
    assert (
        "comes from the activations; to try: calibration=auto, or algorithm=auto, or "
        "'+backend.overrides={a:{float:true}}' (keeps the most sensitive layer in float)" in text
    )
    assert "classes that lose most: cat <1> 90.0 -> 50.0 %\n" in text
    first = text.index("only one site quantized, the most sensitive first (measured)")
    assert first < text.index("activation b", first) < text.index("weight a", first)
    second = text.index("only one site in float, the most helpful first")
    assert second < text.index("activation b", second) < text.index("weight a", second)
    assert "the scale of activation b loses 12.1 dB against a scale from the range of its values" in text
    assert (
        "ONNX Runtime first differs from the simulation at 'b_quant/QuantizeLinear_output' of 'b/Conv'"
        in text
    )


def test_what_was_done_is_not_advised() -> None:
    done = {
        "calibration": {"search": "tournament", "weights": "max"},
        "algorithm": {"bias": {"target": "qatkit.algorithms.BiasCorrection"}},
        "algorithm_choice": "auto",
    }
    bare = dataclasses.replace(FOUND, estimate=[], sensitivity=[])
    text = plain_report(_results(done, bare))
    assert "comes from the activations\n" in text
    small = {**FOUND.isolation.outcomes, "both": FOUND.isolation.outcomes["float"]}  # type: ignore[union-attr]
    fine = dataclasses.replace(FOUND, isolation=dataclasses.replace(FOUND.isolation, outcomes=small))  # type: ignore[type-var]
    assert "together they lose almost nothing" in plain_report(_results({}, fine))


def test_names_on_the_page_are_text() -> None:
    page = render_page(_results({}, FOUND))
    assert "cat &lt;1&gt; 90.0 -&gt; 50.0 %" in page and "cat <1>" not in page
    assert 'class="problem"' in page and "26 % of the grid" in page
    assert render_page(_results({}, Analysis())).count("<svg") == 0


def test_an_estimate_alone_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    only = Analysis(estimate=FOUND.estimate)
    assert "(estimated)" in render_page(_results({}, only))
    assert draw(tmp_path / "pictures", only) == ["sensitivity.png"]
    assert os.listdir(tmp_path / "pictures") == ["sensitivity.png"]


def test_sums_of_nothing_are_an_outcome() -> None:
    assert Sums().outcome() == Outcome(0, None, 0.0, 0.0, None, None)
