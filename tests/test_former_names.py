"""Tests of former names of modules and tasks: imports, and configurations saved with them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from qatkit.config.compose import compose_config, load_config, save_config
from qatkit.former_names import FORMER_NAMES, FORMER_TASKS, present_name
from qatkit.models.hf_heads import ENCODER
from qatkit.models.hf_models import of_task
from qatkit.tasks import dotted, task_of
from qatkit_verify.dotted import resolve

CONF = Path(__file__).parents[1] / "conf"


@pytest.mark.parametrize("former", FORMER_NAMES)
def test_a_former_name_is_the_present_module(former: str) -> None:
    module = importlib.import_module(former)
    assert module is importlib.import_module(FORMER_NAMES[former])
    assert module.__spec__ is not None and module.__spec__.name == FORMER_NAMES[former]


def test_users_code_written_for_former_names_runs_unchanged() -> None:
    code = (
        "import qatkit.observers.entropy\n"
        "from qatkit.observers import MSEObserver, Observer\n"
        "from qatkit import backends, observers\n"
        "from qatkit.quant.observers import MSEObserver as Present\n"
        "from qatkit.learned.lsq import LSQFakeQuantize\n"
        "class Mine(MSEObserver): pass\n"
        "assert MSEObserver is Present and issubclass(Mine, Observer)\n"
        "assert qatkit.observers.entropy.EntropyObserver is observers.EntropyObserver\n"
        "assert backends.FBGEMM.name == 'fbgemm' and LSQFakeQuantize.__module__ == 'qatkit.quant.learned.lsq'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_no_former_name_stays() -> None:
    for text in (
        "qatkit.data.digits",
        "qatkit.observersx.A",
        "my.qatkit.observers.A",
        "resnet18",
        "",
        "a/b.pt",
    ):
        assert present_name(text) == text
    assert present_name("qatkit.learned.lsq.LSQFakeQuantize") == "qatkit.quant.learned.lsq.LSQFakeQuantize"


def test_a_config_saved_under_former_names_equals_the_new_one(tmp_path: Path) -> None:
    overrides = ["calibration=mse", "quantizer=lsq"]
    present = compose_config(CONF, overrides)
    save_config(present, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    for former, name in FORMER_NAMES.items():
        text = text.replace(f" {name}.", f" {former}.")
    assert "qatkit.quant" not in text and "qatkit.observers.MSEObserver" in text
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path / "config.yaml") == present
    typed = compose_config(CONF, [*overrides, "backend.target=qatkit.backends.FBGEMM"])
    assert typed.backend.target == present.backend.target == "qatkit.quant.backends.FBGEMM"
    assert resolve(typed.backend.target, "backend.target").name == "fbgemm"


@pytest.mark.parametrize("former", FORMER_TASKS)
def test_a_former_task_is_the_present_one(former: str, tmp_path: Path) -> None:
    present = compose_config(CONF, ["recipe=text_embedding_ptq", "data.root=pairs"])
    assert present.task == "text_pairs" and task_of(former).names.name == "text_pairs"
    typed = compose_config(CONF, ["recipe=text_embedding_ptq", "data.root=pairs", f"task={former}"])
    assert dotted(typed.task) == dotted(present.task)
    save_config(present, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text().replace("task: text_pairs", f"task: {former}")
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path / "config.yaml") == typed


def test_a_library_call_with_a_former_task_finds_its_head() -> None:
    assert of_task("text_embedding").head is of_task("text_pairs").head is ENCODER
