"""Tests of the command `qatkit`, its subcommands and `qatkit doctor`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qatkit.cli.scripts import main

ROOT = Path(__file__).parent.parent.parent
PATHS = (str(ROOT), str(ROOT / "packages" / "verify"))


def _extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project["optional-dependencies"]) - {"dev", "browser", "postgresql"}


def test_doctor_lists_versions_and_every_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["qatkit", "doctor"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line[2:].split("  ")[0] for line in lines}
    assert {"python", "torch", "onnxruntime", "cpu", "int8 products", "threads", "gpu", "disk"} <= rows
    assert {row.removeprefix("extra ") for row in rows if row.startswith("extra ")} == _extras()
    assert lines[-1].startswith("ready")


def test_doctor_says_what_is_missing_and_how_to_get_it() -> None:
    code = f"import sys; sys.path[:0] = {PATHS!r}; sys.argv = ['qatkit', 'doctor']; " + (
        "from qatkit.cli.scripts import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("! torch ")]
    assert "missing" in line and "uv sync" in line
    assert done.stdout.splitlines()[-1].startswith("missing or broken: torch,")


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["--help"], 0, "qatkit doctor"),
        ([], 0, "qatkit doctor"),
        (["trian"], 2, "expected one of train, export"),
    ],
)
def test_the_command_lists_its_subcommands(
    arguments: list[str],
    status: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["qatkit", *arguments])
    assert main() == status
    printed = capsys.readouterr()
    assert told in printed.out + printed.err


def test_a_subcommand_is_the_command_of_that_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/qatkit", "train", "recipe=nothing"])
    assert main() == 2
    assert "recipe=nothing" in capsys.readouterr().err
    assert Path(sys.argv[0]).name == "qatkit-train"
