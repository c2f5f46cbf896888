"""Tests of a recurrent keyword spotter, from WAV files to a bundle with a file for chunks of a recording."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from command_line import CONF
from recorded_words import spoken
from tiny_run import report_of
from torch import Tensor, nn

from qatkit.config.compose import compose_config
from qatkit.config.rules import validate
from qatkit.config.schema import Config
from qatkit.encryption.cipher import is_encrypted, new_key
from qatkit.jobs import export_checkpoint, pipeline
from qatkit.models.streaming_gru import StreamingGRU
from qatkit.records.run_files import CHECKPOINT_FILE
from qatkit_verify.command import main as verify_bundle
from qatkit_verify.errors import ConfigError
from qatkit_verify.sound import SoundPreprocess
from qatkit_verify.sound_files import read_sound


class LooksAhead(StreamingGRU):
    """A spotter in which the features of each frame also depend on the next frame."""

    def __init__(self, num_classes: int, **sizes: Any) -> None:
        super().__init__(num_classes, **sizes)
        self.near = nn.Conv1d(40, 40, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.near(x.squeeze(1).transpose(1, 2)).transpose(1, 2).unsqueeze(1))


def asked(run: Path, words: Path, *changes: str) -> Config:
    return compose_config(
        CONF,
        [
            "data=spoken_digits", "task=audio_classification", "model=streaming_gru", "model.num_classes=null",
            f"data.root={words}", f"output_dir={run}", "data.seconds=0.4", "data.batch_size=8",
            "calibration.images=32", "calibration.batch_size=8", "verify.latency_runs=2", "verify.max_drop=10",
            "verify.audit=false", "trainer.progress=false", "schedule=from_scratch_adamw", "schedule.float_epochs=15",
            "schedule.float_lr=0.01", "schedule.warmup=0", "export.stream=true", "export.bundle=true",
            "export.dynamic_axes={input:{2:frames}}", *changes,
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken(tmp_path_factory.mktemp("words") / "words", 20)


@pytest.fixture(scope="module")
def made(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Returns the config of a finished run with a bundle."""
    config = asked(tmp_path_factory.mktemp("made") / "run", words)
    assert pipeline.train(config) == 0
    return config


@pytest.mark.slow
def test_a_bundle_hears_a_recording_frame_by_frame(words: Path, made: Config, tmp_path: Path) -> None:
    config, run = made, Path(str(made.output_dir))
    measured = report_of(run)["measured"]["stream"]
    assert measured["agreement"] == 1 and measured["file"] == "model.int8.stream.onnx"
    bundle = run / "bundle"
    answer = tmp_path / "answer.json"
    assert verify_bundle([str(bundle), "--min-speedup", "0.01", "--json", str(answer)]) == 0
    seen = {one["check"]: one["seen"] for one in json.loads(answer.read_text())["checks"]}
    assert seen["answers, in chunks"].startswith("model.stream.onnx against model.onnx on 8 samples: ")
    assert "## In chunks\n\n`model.stream.onnx` reads a recording" in (bundle / "card.md").read_text()
    prepare = SoundPreprocess.from_dict(json.loads((bundle / "preprocess.json").read_text()))
    whole, stream = (ort.InferenceSession(bundle / name) for name in ("model.onnx", "model.stream.onnx"))
    features = prepare(read_sound(str(words / "rise_ann_0.wav")).samples)
    state = np.zeros((1, 128), np.float32)
    for frame in range(prepare.frames):
        given = {"input": features[:, :, frame : frame + 1], "state_0": state}
        logits, state = stream.run(["output", "state_0_next"], given)
    np.testing.assert_allclose(logits, whole.run(None, {"input": features})[0], rtol=0, atol=1e-5)
    labels = (bundle / "labels.txt").read_text().split()
    assert labels[logits[0].argmax()] == "rise"
    again = replace(config, checkpoint=str(run / CHECKPOINT_FILE), output_dir=str(tmp_path / "again"))
    assert export_checkpoint.export(again) == 0
    name = "model.int8.stream.onnx"
    assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes()
    runtime = tmp_path / "dist"
    runtime.mkdir()
    for file in ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        (runtime / file).touch()
    page = replace(config.export, bundle=True, demo=True, demo_runtime=str(runtime))
    with pytest.raises(
        ConfigError,
        match=r"export\.demo=true: expected false with data.source=.*, since the demo only shows pictures",
    ):
        export_checkpoint.export(replace(again, export=page, output_dir=str(tmp_path / "page")))
    assert not (tmp_path / "page").exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no folder in memory")
def test_an_encrypted_export_bundles_the_file_of_chunks(made: Config, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra sign is not installed")
    new_key(tmp_path / "key")
    run, name = Path(str(made.output_dir)), "model.int8.stream.onnx"
    secret = replace(made.export, encrypt=str(tmp_path / "key"), encrypt_bundle=False)
    out = str(tmp_path / "out")
    config = replace(made, checkpoint=str(run / CHECKPOINT_FILE), output_dir=out, export=secret)
    assert export_checkpoint.export(config) == 0
    assert is_encrypted(tmp_path / "out" / name)
    bundled = tmp_path / "out" / "bundle" / "model.stream.onnx"
    assert bundled.read_bytes() == (run / name).read_bytes()


def test_frames_that_see_others_are_found_before_training(words: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = asked(tmp_path / "run", words, f"model.name={__name__}.LooksAhead")
    with pytest.raises(ConfigError, match=r"for 4 samples differ between chunks and whole samples \(.* dB\)"):
        pipeline.train(config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("export.dynamic_axes=none", "export.dynamic_axes=none: expected auto or {input"),
        ("data.features_in=graph", "data.features_in=graph: expected data with export.stream=true"),
        ("export.io=uint8", "export.io=uint8: expected float32 with export.stream=true"),
        ("export.mode=float16", "export.mode=float16: expected static with export.stream=true"),
    ],
)
def test_settings_that_fit_no_chunks_are_refused(change: str, told: str, words: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected (auto|data|float32|static)") as error:
        validate(asked(tmp_path, words, change, "schedule.epochs=0"))
    assert told in str(error.value)
