"""Tests that the wheel contains all that a run needs, and that its commands work outside a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from command_line import CONF, ROOT
from tiny_run import BUNDLE

pytestmark = pytest.mark.slow
RUN = (
    "model.weights=null", "schedule=calibrate_only", "data.image_size=8", "data.workers=0", "calibration.images=64",
    "trainer=cpu",
    "trainer.progress=false", "verify.latency_runs=3", "verify.max_drop=null", "output_dir=here", "recipe=own",
)  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from the checkout and returns its path."""
    folder = tmp_path_factory.mktemp("dist")
    _run(["uv", "build", "--wheel", "--out-dir", str(folder), str(ROOT)], ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of commands of a new environment that shares this one's libraries, except qatkit."""
    folder = tmp_path_factory.mktemp("environment")
    _run(["uv", "venv", "--python", sys.executable, str(folder)], folder)
    _run(
        [
            "uv",
            "pip",
            "install",
            "--no-deps",
            "--python",
            str(folder / "bin" / "python"),
            str(wheel),
            str(ROOT / "packages" / "verify"),
        ],
        folder,
    )
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def _run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_wheel_holds_every_file_of_conf_and_every_recipe(wheel: Path) -> None:
    there = set(zipfile.ZipFile(wheel).namelist())
    wanted = {path.relative_to(CONF).as_posix() for path in CONF.glob("**/*.yaml")}
    wanted |= {f"recipe/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}

    assert len(wanted) > 60
    assert {f"qatkit/conf/{name}" for name in wanted} <= there
    assert "qatkit/report/page.css" in there


@pytest.mark.parametrize("command", ["qatkit-train", "qatkit-export"])
def test_a_command_says_what_it_takes(commands: Path, tmp_path: Path, command: str) -> None:
    said = _run([str(commands / command), "--help"], tmp_path).stdout

    assert said.startswith(f"{command} [FLAG ...]")
    assert "resnet18_cifar10_qat" in said and "schedule.lr: float" in said
    assert os.listdir(tmp_path) == []


def test_a_run_with_an_own_recipe_stays_in_the_working_directory(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "own.yaml").write_text("# @package _global_\nname: own\n")
    where = _run(
        [str(commands / "python"), "-c", "import qatkit; print(qatkit.__file__)"], tmp_path
    ).stdout.strip()

    done = _run([str(commands / "qatkit-train"), "--config-dir", "mine", *RUN], tmp_path)

    assert Path(where).is_relative_to(commands.parent), "the wheel's qatkit, and not the checkout's"
    assert done.stdout.startswith("own: resnet18")
    assert sorted(os.listdir(tmp_path)) == ["here", "mine"]
    assert {path.name for path in (tmp_path / "here").iterdir()} >= BUNDLE

    again = _run([str(commands / "qatkit-export"), "checkpoint=here/last.ckpt", "output_dir=there"], tmp_path)
    assert "sha256" in again.stderr
    assert (tmp_path / "there" / "model.int8.onnx").read_bytes() == (
        tmp_path / "here" / "model.int8.onnx"
    ).read_bytes()
