"""Runs every command of the pages, except those whose comment says `# needs ...`.

The commands of a page run in order in one folder, so that later ones find the files of earlier ones. They are
used as the page shows them, with overrides that shorten them (`_SHORT`) and values for placeholders
(`_VALUES`). The folder also contains the files that the page shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import run_script
from onnx import numpy_helper
from onnx.parser import parse_model
from page_commands import PAGES, ROOT, Command, commands, files, label

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

_RUN = (
    "trainer=cpu",
    "trainer.progress=false",
    "data.workers=0",
    "verify.latency_runs=3",
    "verify.max_drop=null",
)
_FEW = (*_RUN, "calibration.images=64", "data.test_images=64")
_CALIBRATED = (*_FEW, "schedule=calibrate_only")
_TINY = ("model.name=tiny_run.Net", "data.image_size=8")
_TRAINING = (*_FEW, "data.train_images=256", "schedule.float_epochs=1", "schedule.epochs=1")
# Overrides that shorten a command that contains the key; the first match applies.
_SHORT = {
    "--help": (),
    "qatkit-verify": ("--min-speedup=0",),  # a tiny network gets no faster
    "search=": (*_TRAINING, *_TINY, "search.trials=2"),
    "recipe=onnx_ptq": (*_RUN, "calibration.images=16", "data.test_images=16"),
    "data=tones": (*_FEW, "data.train_images=256", "schedule.float_epochs=1", "calibration=minmax"),
    "quantizer": (*_TRAINING, *_TINY),
    "model.name=my_": _CALIBRATED,
    "recipe=": (*_TRAINING, *_TINY),
    "my_": (*_CALIBRATED, *_TINY),
    "train.py": _TRAINING,
}
_VALUES = {"NAME": "quickstart", "KEYFILE": "my.key", "OUTPUT": "opened.ckpt"}
_RUNNABLE = [page for page in PAGES if any(one.steps and not one.needs for one in commands(page))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the output folder of a short quickstart."""
    folder = tmp_path_factory.mktemp("finished")
    done = run_script("train.py", *_TRAINING, *_TINY, "output_dir=run", cwd=folder, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@pytest.mark.parametrize("page", _RUNNABLE, ids=label)
def test_the_commands_of_a_page_run(page: Path, finished: Path, tmp_path: Path) -> None:
    _bring(page, finished, tmp_path)
    for command in commands(page):
        if not command.needs:
            for step in command.steps:
                _run(command, step, finished, tmp_path)


def _run(command: Command, step: list[str], finished: Path, folder: Path) -> None:
    """Runs one program of a command as a reader would, and checks that it succeeds."""
    program, *arguments = [_filled(word, finished, folder) for word in step]
    arguments += next((more for text, more in _SHORT.items() if text in command.text), ())
    environment = _environment(folder)
    if program.endswith(".py"):
        done = run_script(program, *arguments, cwd=folder, env=environment, timeout=1000)
    else:
        words = ["bash", "-c", command.text] if program == "eval" else [program, *arguments]
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command.text}\n{done.stdout}\n{done.stderr}"


def _filled(word: str, finished: Path, folder: Path) -> str:
    """Returns a word of a command with its placeholder replaced."""
    if word == "bundle.zip":
        return str(folder / "release" / "bundle.zip")
    if word == "FILE":
        return str(next(folder.glob("outputs/*/*/last.ckpt")))
    key, equals, value = word.rpartition("=")
    return key + equals + _VALUES.get(value, value).replace("OUTPUT_FOLDER", str(finished))


def _environment(folder: Path) -> dict[str, str]:
    """Returns an environment with this interpreter's commands and with `folder` on the module path."""
    modules = f"{folder}{os.pathsep}{Path(__file__).parent}"  # the latter has the model of `_TINY`
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": modules}
    return os.environ | {
        name: f"{first}{os.pathsep}{os.environ.get(name, '')}" for name, first in paths.items()
    }


def _bring(page: Path, finished: Path, folder: Path) -> None:
    """Writes the files that a page shows or that its commands expect."""
    for name, text in files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    given: dict[str, Callable[[], object]] = {
        "docs/encodings.md": lambda: shutil.copy(finished / "model.int8.onnx", folder),
        "docs/guides/given-onnx.md": lambda: _bring_onnx_files(finished, folder),
        "docs/scale/search.md": lambda: shutil.copytree(finished, folder / "outputs" / "quickstart"),
        "docs/start/install.md": lambda: _bring_a_recipe(folder),
    }
    given.get(label(page), lambda: None)()


def _bring_a_recipe(folder: Path) -> None:
    recipe = folder / "my_conf" / "recipe" / "my_recipe.yaml"
    recipe.parent.mkdir(parents=True)
    text = (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    recipe.write_text(text.replace("name: quickstart", "name: my_recipe"), encoding="utf-8")
    (folder / "train.py").symlink_to(ROOT / "train.py")  # for the completion of `python train.py`


def _bring_onnx_files(finished: Path, folder: Path) -> None:
    """Writes a convolutional network, an embedding table with a mask, and the finished run's INT8 file."""
    shutil.copy(finished / "model.int8.onnx", folder)
    draw = np.random.default_rng(0)
    pictures = """<ir_version: 8, opset_import: ["": 17]>
        pictures (float[batch, 3, height, width] input) => (float[batch, 4] logits) {
            hidden = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (input, kernel)
            active = Relu (hidden)
            pooled = GlobalAveragePool (active)
            flat = Flatten (pooled)
            logits = MatMul (flat, head)
        }"""
    words = """<ir_version: 8, opset_import: ["": 17]>
        words (int64[N, sequence] input_ids, int64[N, sequence] attention_mask) => (float[N, sequence, 4] logits) {
            rows = Gather <axis = 0> (table, input_ids)
            shape = Constant <value_ints = [0, 0, 1]> ()
            mask = Cast <to = 1> (attention_mask)
            column = Reshape (mask, shape)
            kept = Mul (rows, column)
            logits = MatMul (kept, head)
        }"""
    for name, text, shapes in (
        ("model", pictures, {"kernel": (8, 3, 3, 3), "head": (8, 4)}),
        ("bert", words, {"table": (100, 16), "head": (16, 4)}),
    ):
        model = parse_model(text)
        for weight, shape in shapes.items():
            values = draw.normal(size=shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(values, weight))
        onnx.save(model, folder / f"{name}.onnx")
