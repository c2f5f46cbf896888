"""Checks that `--help` and the pages of docs/configuration list every key as the schema describes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from command_line import CONF, ROOT, Launch, no_job, python
from omegaconf import DictConfig, OmegaConf

from qatkit.cli.export_command import EXPORT_KEYS, ONNX_KEYS
from qatkit.cli.reference import pages
from qatkit.config.schema import Config, OverrideConfig


def _keys(values: Any, prefix: str = "") -> list[str]:
    """Returns the full keys of a structured configuration, as OmegaConf sees them."""
    found = []
    for name, value in OmegaConf.structured(values).items() if prefix == "" else values.items():
        nested = isinstance(value, DictConfig) and len(value) > 0
        found += _keys(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
    return found


ALL_KEYS = _keys(Config) + [f"backend.overrides.PATTERN.{key}" for key in _keys(OverrideConfig)]


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_help_lists_every_key_and_option(
    launch: Launch, capsys: pytest.CaptureFixture[str], from_checkpoint: bool
) -> None:
    assert launch(no_job, "--help", from_checkpoint=from_checkpoint) == 0

    lines = capsys.readouterr().out.splitlines()
    told = [line.strip().split(": ")[0] for line in lines if line.startswith("  ") and ": " in line]
    assert set(ALL_KEYS) <= set(told)
    said = "\n".join(lines)
    assert "\n  schedule.lr: float = 0.001  (above 0)\n      learning rate of fine-tuning\n" in said
    mean = "mean per channel of the model's input, in the units of data.pixels (default"
    assert f"\n  data.mean: list[float] | None = null\n      {mean}" in said
    assert "\n  export.opset: int = 13  (13 to 23)\n" in said
    assert "\n  data.bad: str = refuse  (refuse | skip)\n" in said
    assert "\n  algorithm.equalize.relu6: str = keep  (keep | relu)\n" in said
    assert "\n  algorithm.bias_correction.trim: float = 0.05  (0 to 0.49)\n" in said
    assert (
        "\n  backend:     fbgemm, npu_cnn, npu_transformer, qnnpack, simulated, simulated_products, tensorrt, w4a16,\n"
        "               w8a16, weight_only\n" in said
    )
    assert max(map(len, lines)) <= 120
    words = " ".join(said.split())
    for keys in (EXPORT_KEYS, ONNX_KEYS):
        assert (", ".join(keys) in words) == from_checkpoint
    assert os.listdir() == []


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_help_describes_paths_once(
    launch: Launch, capsys: pytest.CaptureFixture[str], from_checkpoint: bool
) -> None:
    assert launch(no_job, "--help", from_checkpoint=from_checkpoint) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("of at most 4000 bytes") == 1
    assert "output_dir: str | None = null (a path) folder of the run" in said


def test_help_lists_the_options_of_a_folder_of_ones_own(
    launch: Launch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "birdnet.yaml").write_text("name: birds.Net")

    assert launch(no_job, "--help", "--config-dir", str(tmp_path / "mine")) == 0
    options = capsys.readouterr().out.partition("\n  model:")[2].partition(":")[0]
    assert "birdnet" in options and "resnet18" in options


def test_the_pages_are_what_the_schema_says() -> None:
    """If this fails, `uv run scripts/configuration.py` writes the pages."""
    docs = ROOT / "docs"
    wanted = pages(CONF)
    files = [docs / "configuration.md", *(docs / "configuration").glob("*.md")]
    written = {path.relative_to(docs).as_posix(): path.read_text(encoding="utf-8") for path in files}
    assert written == wanted
    text = "\n".join(wanted.values())
    for key in ALL_KEYS:
        assert f"\n| `{key}` | " in text
    assert "\n| `verify.max_drop` | `float \\| None` | `1.0` | -100 to 100 | " in text


def test_the_script_writes_and_checks_the_page(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "configuration.py")
    before = (ROOT / "docs" / "configuration.md").stat().st_mtime_ns

    checked = python(script, "--check", cwd=tmp_path)

    assert (checked.returncode, checked.stdout) == (0, "configuration.md is current\n")
    assert (ROOT / "docs" / "configuration.md").stat().st_mtime_ns == before
