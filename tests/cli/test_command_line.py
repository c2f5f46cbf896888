"""Tests of the command line: the configuration of jobs, exit statuses, and sweeps over many jobs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from command_line import CONF, RECIPES, ROOT, Launch, python, run_script
from hydra.core.override_parser.overrides_parser import OverridesParser

from qatkit.config.quoting import quoted
from qatkit.config.schema import Config
from qatkit_verify.errors import ConfigError


def test_the_job_gets_its_configuration_and_its_folder(launch: Launch, tmp_path: Path) -> None:
    seen: list[Config] = []

    assert (
        launch(seen.append, "recipe=mobilenet_v2_qat", "backend=qnnpack", "schedule.lr=2e-5", "data.root=x")
        == 0
    )

    (config,) = seen
    assert type(config) is Config
    assert config.model.name == "mobilenet_v2"
    assert config.backend.target == "qatkit.quant.backends.QNNPACK"
    assert config.schedule.lr == 2e-5
    assert config.output_dir is not None
    assert re.fullmatch(r"outputs/mobilenet_v2_qat/[\d_-]+", config.output_dir)
    assert (
        os.listdir(tmp_path) == []
    )  # the pipeline creates the folder once it has checked the data and the model


@pytest.mark.parametrize("status", [0, 1])
def test_the_status_of_the_job_is_the_status_of_the_command(launch: Launch, status: int) -> None:
    assert launch(lambda config: status) == status


def test_a_configuration_error_in_the_job_is_one_line(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    def job(config: Config) -> int:
        raise ConfigError("data.root", "/nowhere", "a folder\nwith train/ and val/")

    assert launch(job) == 2
    assert capfd.readouterr().err == "error: data.root=/nowhere: expected a folder with train/ and val/\n"


@pytest.mark.parametrize(
    ("typed", "number"),
    [
        ("export.version=1.10", "1.1"),
        ("name=2026_11_23", "20261123"),
        ("+name=1e3", "1000.0"),
        ("name=true", "True"),
    ],
)
@pytest.mark.parametrize("sweep", [(), ("-m", "seed=0,1")])
def test_text_that_reads_as_a_number_is_refused_without_quotes(
    typed: str, number: str, sweep: tuple[str, ...], launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[Config] = []
    key, _, value = typed.lstrip("+").partition("=")
    assert launch(seen.append, *sweep, typed) == 2 and not seen
    quoted = f"{key}=\"'{value}'\""
    assert (
        capfd.readouterr().err
        == f"error: {key}={value}: expected quotes around the text, {quoted}; without quotes, the value is {number}\n"
    )
    assert launch(seen.append, f"{key}='{value}'") == 0
    group, _, leaf = key.rpartition(".")
    assert getattr(seen[0].export if group else seen[0], leaf) == value


def test_a_text_that_is_a_plain_number_is_taken(launch: Launch) -> None:
    seen: list[Config] = []
    assert launch(seen.append, "name=7", "export.version=1.5") == 0
    assert (seen[0].name, seen[0].export.version) == ("7", "1.5")


@pytest.mark.parametrize(
    "text", ["plain", r"a\b", r"end\\"[:-1], r"two\\end\\", "it's, me", r"back\'s", r"\\''\\", "ü {x: [1]}"]
)
def test_a_text_in_quotes_is_read_as_it_is(text: str) -> None:
    (found,) = OverridesParser.create().parse_overrides([f"output_dir={quoted(text)}"])
    assert str(found.value()) == text


@pytest.mark.parametrize("name", ["it's, me", r"back\slash", "plain"])
def test_a_config_dir_may_have_any_name(name: str, launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / name / "schedule"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("lr: 0.125\n")
    seen: list[Config] = []
    assert launch(seen.append, "--config-dir", str(folder.parent), "schedule=mine") == 0
    assert seen[0].schedule.lr == 0.125


def test_folders_of_both_kinds_are_searched(launch: Launch, tmp_path: Path) -> None:
    for name, key in (("one", "schedule"), ("it's, two", "data")):
        (tmp_path / name / key).mkdir(parents=True)
    (tmp_path / "one" / "schedule" / "mine.yaml").write_text("lr: 0.125\n")
    (tmp_path / "it's, two" / "data" / "theirs.yaml").write_text("batch_size: 24\n")
    where = f"hydra.searchpath=[{quoted('file://' + str(tmp_path / 'one'))}]"
    seen: list[Config] = []
    assert (
        launch(
            seen.append, "--config-dir", str(tmp_path / "it's, two"), where, "schedule=mine", "data=theirs"
        )
        == 0
    )
    assert (seen[0].schedule.lr, seen[0].data.batch_size) == (0.125, 24)


_WARNINGS = """
import sys, warnings
from pathlib import Path
from qatkit.cli.command_line import main

def job(config):
    warnings.warn_explicit("few images", UserWarning, str(Path(ROOT, "qatkit", "run", "calibrate.py")), 1)
    warnings.warn_explicit("elsewhere", UserWarning, "/other/place.py", 7)

shown = warnings.showwarning
status = main(job, Path(ROOT, "conf"))
assert warnings.showwarning is shown
sys.exit(status)
"""


def test_our_own_warnings_are_one_line(tmp_path: Path) -> None:
    """Runs in its own process, since the format of warnings is global."""
    code = f"ROOT = {str(ROOT)!r}\n{_WARNINGS}"
    found = python("-c", code, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stderr == "warning: few images\n/other/place.py:7: UserWarning: elsewhere\n"


def test_any_other_error_keeps_its_traceback(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    def job(config: Config) -> int:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect") as raised:
        launch(job)
    assert Path(raised.traceback[-1].path).name == "test_command_line.py"
    assert "error: " not in capfd.readouterr().err


def interrupted(config: Config) -> int:
    raise KeyboardInterrupt


def test_an_interrupted_run_says_how_to_go_on(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(interrupted) == 130
    assert capfd.readouterr().err == "interrupted: run the same command with resume=auto to continue\n"


def test_a_sweep_runs_every_combination_in_a_folder_of_its_own(launch: Launch) -> None:
    seen: list[Config] = []

    def job(config: Config) -> int:
        seen.append(config)
        return int(config.model.name == "resnet50")

    command = ["-m", "recipe=resnet50_qat,mobilenet_v2_qat", "backend=fbgemm,qnnpack", "data.root=x"]
    assert launch(job, *command) == 1

    assert [(config.name, config.backend.target.rpartition(".")[2]) for config in seen] == [
        ("resnet50_qat", "FBGEMM"),
        ("resnet50_qat", "QNNPACK"),
        ("mobilenet_v2_qat", "FBGEMM"),
        ("mobilenet_v2_qat", "QNNPACK"),
    ]
    assert len({config.output_dir for config in seen}) == 4
    assert os.listdir() == ["multirun"]  # Hydra's record of the sweep


def test_a_sweep_goes_on_after_a_job_that_cannot_run(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def job(config: Config) -> int:
        seen.append(config.seed)
        if config.seed == 1:
            raise ConfigError("seed", 1, "any but 1")
        return 0

    assert launch(job, "-m", "seed=1,2,3") == 2
    assert seen == [1, 2, 3]
    assert capfd.readouterr().err == "error: seed=1: expected any but 1\n"


@pytest.mark.slow
def test_every_recipe_can_be_swept_over(launch: Launch) -> None:
    seen: list[str] = []

    launch(
        lambda config: seen.append(config.name), "-m", "recipe=glob(*,exclude=onnx_*)", "data.root=x",
        "model.checkpoint=y",
    )  # fmt: skip

    assert seen == [name for name in RECIPES.split(", ") if not name.startswith("onnx_")]


def test_other_ranks_of_a_job_repeat_this_job_alone(launch: Launch) -> None:
    """Lightning starts the other ranks with `sys.argv`, which must compose to this job's configuration."""
    seen: list[tuple[Config, list[str]]] = []

    launch(lambda config: seen.append((config, sys.argv[1:])), "-m", "seed=1,2", "name='it\\'s'")

    assert sys.argv[1:] == ["-m", "seed=1,2", "name='it\\'s'"]
    again: list[Config] = []
    for _, arguments in seen:
        assert launch(again.append, *arguments) == 0
    assert again == [config for config, _ in seen]


@pytest.mark.parametrize(
    ("script", "typed", "line"),
    [
        ("train.py", "recipe=vit", "error: recipe=vit: expected one of "),
        ("train.py", "schedule.lr=fast", "error: schedule.lr=fast: expected a value of type float"),
        (
            "export.py",
            "checkpoint=none.ckpt",
            "error: checkpoint=none.ckpt: expected a checkpoint written by train.py",
        ),
    ],
)
def test_the_scripts_run_from_any_folder(tmp_path: Path, script: str, typed: str, line: str) -> None:
    done = python(str(ROOT / script), typed, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_mistake_shows_before_torch_is_imported(tmp_path: Path) -> None:
    done = python("-X", "importtime", str(ROOT / "train.py"), "export.opset=12", cwd=tmp_path)

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "hydra" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "lightning", "onnxruntime")}


def test_help_and_cfg_need_no_run(tmp_path: Path) -> None:
    shown = run_script("train.py", "--cfg", "job", "schedule.lr=0.125", cwd=tmp_path)
    helped = run_script("train.py", "--help", cwd=tmp_path)

    assert (shown.returncode, helped.returncode) == (0, 0)
    assert "lr: 0.125" in shown.stdout
    assert "recipe: " in helped.stdout
    assert os.listdir(tmp_path) == []


RANKS = """
import sys
from pathlib import Path
import lightning
import torch
from qatkit.cli.command_line import main

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def job(config):
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=1, **quiet)
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 2), 2))
    Path(f"{config.seed}_{trainer.global_rank}_of_{trainer.world_size}").write_text(config.output_dir)
    return 0

if __name__ == "__main__":
    sys.exit(main(job, Path(CONF)))
"""


@pytest.mark.slow
def test_each_job_of_a_sweep_trains_on_two_ranks_that_agree(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(f"CONF = {str(CONF)!r}\n{RANKS}")

    done = python("ranks.py", "-m", "seed=1,2", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    for seed in (1, 2):
        folders = {(tmp_path / f"{seed}_{rank}_of_2").read_text() for rank in (0, 1)}
        assert len(folders) == 1
