"""Tests of recordings from WAV files to a bundle that is verified on raw samples without torch or qatkit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import CONF
from recorded_words import WORDS, spoken, word
from sounds import wav
from tiny_run import report_of

from qatkit.config.compose import compose_config
from qatkit.config.schema import Config
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.records.run_files import CHECKPOINT_FILE
from qatkit_verify.bundle.manifest import MANIFEST, entry, read_manifest, write_manifest
from qatkit_verify.command import main as verify_bundle
from qatkit_verify.sound import SoundPreprocess
from qatkit_verify.sound_files import read_sound

WITHOUT_TORCH = (
    "import sys\n"
    "for name in ('torch', 'qatkit', 'lightning', 'scipy', 'PIL'): sys.modules[name] = None\n"
    "from qatkit_verify.command import main\n"
    "sys.exit(main(sys.argv[1:]))"
)


def asked(run: Path, *changes: str) -> Config:
    return compose_config(
        CONF,
        [
            "data=spoken_digits", "task=audio_classification", "model=ds_cnn", "model.num_classes=null",
            "model.kwargs.channels=16", "model.kwargs.blocks=1", f"output_dir={run}", "data.seconds=0.5",
            "data.batch_size=8", "data.augment=shift_gain_noise", "calibration.images=32",
            "calibration.batch_size=8", "verify.latency_runs=2", "verify.max_drop=5", "trainer.progress=false",
            "schedule=from_scratch_adamw", "schedule.float_epochs=12", "schedule.float_lr=0.01", "schedule.epochs=1",
            "schedule.warmup=0", "schedule.lr=1e-4", *changes,
        ],
    )  # fmt: skip


@pytest.fixture(scope="module", params=["data", "graph"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """Returns the config of a run with float training and QAT on three words, and the folder of the words."""
    top = tmp_path_factory.mktemp("words")
    words = spoken(top / "words", 25)
    changes = (f"data.root={words}", f"data.features_in={request.param}", "export.bundle=true")
    config = asked(top / "run", *changes)
    assert pipeline.train(config) == 0
    return config, words


@pytest.mark.slow
def test_accuracy_is_that_of_the_file_on_raw_recordings(made: tuple[Config, Path]) -> None:
    run, words = Path(str(made[0].output_dir)), made[1]
    report, bundle = report_of(run), run / "bundle"
    prepare = SoundPreprocess.from_dict(json.loads((bundle / "preprocess.json").read_text()))
    labels, session = (bundle / "labels.txt").read_text().split(), ort.InferenceSession(bundle / "model.onnx")
    files = [path for path in sorted(words.iterdir()) if int(path.stem.rpartition("_")[2]) < 5]
    batch = prepare.batch([read_sound(str(path)).samples for path in files])
    (scores,) = session.run(None, {session.get_inputs()[0].name: batch})
    right = np.mean(
        [labels[s.argmax()] == path.name.partition("_")[0] for s, path in zip(scores, files, strict=True)]
    )
    assert report["accuracy"]["int8"]["top1"] == pytest.approx(100 * right) and right > 0.9
    assert report["classes"] == sorted(WORDS) and report["task"]["samples"] == "recordings"


@pytest.mark.slow
def test_the_report_draws_recordings_with_both_answers(made: tuple[Config, Path]) -> None:
    run = Path(str(made[0].output_dir))
    examples = report_of(run)["examples"]
    assert examples["looked_at"] == 30 and len(examples["rows"]) == 4
    for row in examples["rows"]:
        spoken_word, exact, found = (panel["title"] for panel in row["panels"])
        assert spoken_word.removeprefix("truth: ") in WORDS
        assert exact.removeprefix("float: ") in WORDS and found.removeprefix("INT8: ") in WORDS
        assert any(shape["label"] == "0.2 s" for shape in row["panels"][0]["shapes"])
    assert (run / "report.html").read_text().count("data:image/png") >= 12


@pytest.mark.slow
def test_its_bundle_is_checked_without_torch(made: tuple[Config, Path]) -> None:
    bundle = Path(str(made[0].output_dir)) / "bundle"
    typed = [sys.executable, "-c", WITHOUT_TORCH, str(bundle), "--min-speedup", "0.01"]
    done = subprocess.run(typed, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "8 recordings (3000 samples) are bit-identical" in done.stdout, (
        done.stderr
    )
    card = (bundle / "card.md").read_text()
    assert "pipeline_tag: audio-classification" in card and "samples at 8000 Hz" in card
    refused = subprocess.run(
        [*typed, "--pictures", str(made[1])], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and "needs recordings, not pictures; use --recordings" in refused.stderr


@pytest.mark.slow
def test_accuracy_on_a_folder_is_that_of_the_report(made: tuple[Config, Path], tmp_path: Path) -> None:
    run, words = Path(str(made[0].output_dir)), made[1]
    for path in words.iterdir():
        if int(path.stem.rpartition("_")[2]) < 5:
            target = tmp_path / "sorted" / path.name.partition("_")[0] / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    told = tmp_path / "told.json"
    typed = [
        str(run / "bundle"),
        "--recordings",
        str(tmp_path / "sorted"),
        "--min-speedup",
        "0.01",
        "--json",
        str(told),
    ]
    assert verify_bundle(typed) == 0
    (found,) = [one for one in json.loads(told.read_text())["checks"] if one["check"] == "recordings"]
    assert found["figures"]["top1"] == pytest.approx(report_of(run)["accuracy"]["int8"]["top1"])
    wav(tmp_path / "sorted" / "hum" / "fast.wav", word("hum", 0), 16000)
    assert verify_bundle(typed) == 2


@pytest.mark.slow
def test_another_preparation_is_found_by_the_golden_samples(
    made: tuple[Config, Path], tmp_path: Path
) -> None:
    bundle = Path(str(made[0].output_dir)) / "bundle"
    other = tmp_path / "bundle"
    other.mkdir()
    for path in bundle.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            target = other / path.relative_to(bundle)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    told = json.loads((other / "preprocess.json").read_text())
    changed = {"samples": told["samples"] - 1} if told["features"] == "waveform" else {"log_offset": 2e-6}
    (other / "preprocess.json").write_text(json.dumps(told | changed))
    manifest = read_manifest(bundle)
    write_manifest(other, replace(manifest, files=tuple(entry(other, one.name) for one in manifest.files)))
    assert verify_bundle([str(other), "--min-speedup", "0.01"]) == 1


@pytest.mark.slow
def test_a_checkpoint_gives_the_same_bytes_again(made: tuple[Config, Path], tmp_path: Path) -> None:
    run = Path(str(made[0].output_dir))
    again = replace(made[0], checkpoint=str(run / CHECKPOINT_FILE), output_dir=str(tmp_path / "again"))
    assert export_checkpoint.export(again) == 0
    assert (tmp_path / "again" / "model.int8.onnx").read_bytes() == (run / "model.int8.onnx").read_bytes()


@pytest.mark.slow
def test_features_in_the_graph_stay_float_at_opset_13(made: tuple[Config, Path]) -> None:
    config, report = made[0], report_of(Path(str(made[0].output_dir)))
    file = onnx.load(Path(str(config.output_dir)) / "model.int8.onnx")
    kinds = [node.op_type for node in file.graph.node]
    assert [one.version for one in file.opset_import if one.domain == ""] == [13]
    assert ("Log" in kinds) == (config.data.features_in == "graph")
    skipped = [site for site, _ in report["skipped"] if site.startswith("features.")]
    assert bool(skipped) == (config.data.features_in == "graph")
