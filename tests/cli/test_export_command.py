"""Tests of the command line of export.py with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Launch, no_job

from qatkit.config.compose import save_config
from qatkit.config.schema import Config


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Returns an empty checkpoint in a run's folder, next to the config.yaml that training leaves there."""
    config = Config(name="mine", seed=7, output_dir="elsewhere", resume="gone.ckpt")
    config.schedule.lr = 0.25
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run" / "config.yaml")
    path = tmp_path / "run" / "last.ckpt"
    path.write_text("")
    return path


def test_an_export_takes_the_configuration_of_the_run(launch: Launch, checkpoint: Path) -> None:
    seen: list[Config] = []

    typed = [f"checkpoint={checkpoint}", "export.opset=17", "verify.threads=4"]
    assert launch(seen.append, *typed, from_checkpoint=True) == 0

    (config,) = seen
    assert (config.name, config.seed, config.schedule.lr) == ("mine", 7, 0.25)
    assert (config.export.opset, config.verify.threads) == (17, 4)
    assert (config.checkpoint, config.output_dir) == (str(checkpoint), str(checkpoint.parent))
    assert config.resume is None


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            ["checkpoint=CKPT", "schedule.lr=1"],
            "schedule.lr=1: the key cannot be set when a checkpoint is exported; the keys that can are ",
        ),
        (
            ["checkpoint=CKPT", "backend=qnnpack"],
            "backend=qnnpack: the key cannot be set when a checkpoint is exported",
        ),
        (["checkpoint=CKPT", "export.opset=9"], "export.opset=9: expected an integer from 13 to 23"),
        (["checkpoint=nothing.ckpt"], "checkpoint=nothing.ckpt: expected a checkpoint written by train.py"),
        (
            ["checkpoint=CKPT", "data.mean=[0.1]"],
            "data.mean=[0.1]: the key can only be set with export.io=uint8",
        ),
        (
            ["checkpoint=CKPT", "data.root=/moved"],
            "data.root=/moved: the key can only be set with export.io=uint8, where images determine the range of the "
            "outputs; with export.bundle=true, so can data.root, data.tokenizer, data.download, data.workers",
        ),
        (
            ["checkpoint=CKPT", "export.bundle=true", "data.root=/moved", "data.mean=[0.1]"],
            "data.mean=[0.1]: the key can only be set with export.io=uint8",
        ),
        ([], "checkpoint=null: expected a checkpoint written by train.py"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(
    launch: Launch, capfd: pytest.CaptureFixture[str], checkpoint: Path, typed: list[str], line: str
) -> None:
    typed = [text.replace("CKPT", str(checkpoint)) for text in typed]

    assert launch(no_job, *typed, from_checkpoint=True) == 2
    printed = capfd.readouterr().err
    assert printed.startswith(f"error: {line}")
    assert printed.count("\n") == 1


def test_an_export_without_a_saved_config_names_the_missing_file(
    launch: Launch, capfd: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    checkpoint.with_name("config.yaml").unlink()

    assert launch(no_job, f"checkpoint={checkpoint}", from_checkpoint=True) == 2
    assert capfd.readouterr().err.endswith("run/config.yaml is missing\n")
