"""What is typed: mistakes become one line and status 2, jobs get their configuration, statuses come back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qatkit.config import Config, save_config
from qatkit.errors import ConfigError
from qatkit.launch import Job, main

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"

Launch = Callable[..., int]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launch:
    """`launch(job, *typed)`: `main` with a command line, in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run(job: Job, *typed: str, from_checkpoint: bool = False) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", *typed])
        return main(job, CONF, from_checkpoint=from_checkpoint)

    return run


def no_job(config: Config) -> int:
    raise AssertionError("a mistake on the command line must be found before the job")


RECIPES = ", ".join(sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
MISTAKES = [
    # unknown recipe, option, key
    (["recipe=resnt18_qat"], f"recipe=resnt18_qat: one of {RECIPES} (did you mean resnet18_qat?)"),
    (["backend=fbgem"], "backend=fbgem: one of fbgemm, qnnpack, tensorrt (did you mean fbgemm?)"),
    (["model=[vit_b_16,nothing]"], "model=nothing: one of efficientnet_b0, mobilenet_v2, "),
    (["hydra/launcher=slrm"], "hydra/launcher=slrm: one of basic"),
    (["schedule.lrr=1"], "schedule.lrr=1: no such key; near it: schedule.lr, "),
    (["schedul.lr=1"], "schedul.lr=1: no such key; near it: schedule.lr, "),
    (["recipie=quickstart"], "recipie=quickstart: no such key; near it: recipe, "),
    (["+foo=1"], "foo=1: no such key; near it: "),
    (["++schedule.lrr=1"], "schedule.lrr=1: no such key; near it: schedule.lr, "),
    (["hydra.verbos=1"], "hydra.verbos=1: no such key; near it: hydra.verbose, "),
    (["model.kwargs.p=1"], "model.kwargs.p=1: an entry that exists; a new one is set with +model.kwargs.p=1"),
    (
        ["backend.overrides={conv1:{float:true}}"],
        "backend.overrides={conv1:{float:true}}: an entry that exists; a new one is set with "
        "+backend.overrides={conv1:{float:true}}",
    ),
    (
        ["+backend.overrides.conv1.float=true"],
        "backend.overrides.conv1.float=true: to be set as a whole, +backend.overrides={conv1:{float:true}}",
    ),
    (
        ["+backend.overrides={conv1:{flot:true}}"],
        "backend.overrides.conv1.flot=...: no such key; near it: backend.overrides.conv1.float, ",
    ),
    # wrong type
    (["schedule.lr=abc"], "schedule.lr=abc: a value of type float"),
    (["schedule.epochs=1.5"], "schedule.epochs=1.5: a value of type int"),
    (["schedule.max_steps=many"], "schedule.max_steps=many: a value of type int | None"),
    (["trainer.devices=null"], "trainer.devices=None: a value of type int"),
    (["data.mean=3"], "data.mean=3: a value of type list[float] | None"),
    (["schedule=5"], "schedule=5: Config group override must be a string or a list"),
    (
        ["+backend.overrides={conv1:{float:maybe}}"],
        "backend.overrides.conv1.float=maybe: a value of type bool",
    ),
    # value
    (["export.opset=12"], "export.opset=12: 13 to 23"),
    (["calibration.images=0"], "calibration.images=0: 1 or higher"),
    (["recipe=vit_qat"], "data.root=...: required, the folder with train/ and val/"),
    (
        ["recipe=vit_cifar10_qat", "data.root=x"],
        "model.checkpoint=...: required, a float state_dict of this model",
    ),
    (["checkpoint=x.ckpt"], "checkpoint=x.ckpt: null: export.py reads it"),
    (["resume=nothing.ckpt"], "resume=nothing.ckpt: null, auto, or a checkpoint file that exists"),
    (
        ["backend.target=qatkit.backends.FBGEM"],
        "backend.target=qatkit.backends.FBGEM: a name in qatkit.backends",
    ),
    (["model.name=nowhere.build"], "model.name=nowhere.build: a dotted path that can be imported (No module"),
    # syntax
    (["schedule.lr"], "schedule.lr=: KEY=VALUE"),
    (["checkpoint=a=b"], "checkpoint=a=b: KEY=VALUE, special characters in quotes: \"checkpoint='a=b'\""),
    (["--epochs", "3"], "argument=--epochs: KEY=VALUE"),
    (["~schedule.lrr"], "~schedule.lrr=: Could not delete from config. 'schedule.lrr' does not exist."),
    (["data.root=${nothing}"], "data.root=${nothing}: Interpolation key 'nothing' not found"),
    # sweeps
    (
        ["backend=fbgemm,qnnpack"],
        "backend=fbgemm,qnnpack: one value; with -m before it, a sweep over several",
    ),
    (["-m", "recipe=vit_qat,quickstart"], "data.root=...: required, the folder"),
    (
        ["-m", "backend=fbgemm,qnnpck"],
        "backend=qnnpck: one of fbgemm, qnnpack, tensorrt (did you mean qnnpack?)",
    ),
    (["-m", "schedule.lr=1e-4,abc", "seed=1,2"], "schedule.lr=abc: a value of type float"),
    (["-m", "recipe=glob(nothing*)"], "recipe=glob(nothing*): at least one option that matches"),
]


@pytest.mark.parametrize(("typed", "line"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_one_line_and_status_2(
    launch: Launch, capfd: pytest.CaptureFixture[str], typed: list[str], line: str
) -> None:
    assert launch(no_job, *typed) == 2

    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {line}")
    assert printed.err.count("\n") == 1
    assert os.listdir() == []


def test_a_mistake_in_a_recipe_of_ones_own_names_the_file(
    launch: Launch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "own.yaml").write_text("# @package _global_\nschedule:\n  lrr: 1\n")

    assert launch(no_job, "--config-dir", "mine", "recipe=own") == 2

    printed = capfd.readouterr().err
    assert printed.startswith("error: schedule.lrr=...: no such key; near it: schedule.lr, ")
    assert printed.endswith(" (in recipe/own.yaml)\n")


def test_a_gpu_that_is_not_there_is_refused(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert launch(no_job, "trainer=gpu") == 2
    assert capfd.readouterr().err == "error: trainer.accelerator=gpu: auto or cpu: no GPU is visible\n"


def test_an_output_dir_that_cannot_be_made_is_refused(
    launch: Launch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    assert launch(no_job, "output_dir=file/run") == 2
    assert capfd.readouterr().err.startswith("error: output_dir=file/run: a folder that can be created")


def test_the_job_gets_its_configuration_and_its_folder(launch: Launch, tmp_path: Path) -> None:
    seen: list[Config] = []

    assert (
        launch(seen.append, "recipe=mobilenet_v2_qat", "backend=qnnpack", "schedule.lr=2e-5", "data.root=x")
        == 0
    )

    (config,) = seen
    assert type(config) is Config
    assert config.model.name == "mobilenet_v2"
    assert config.backend.target == "qatkit.backends.QNNPACK"
    assert config.schedule.lr == 2e-5
    assert config.output_dir is not None
    assert re.fullmatch(r"outputs/mobilenet_v2_qat/[\d_-]+", config.output_dir)
    assert (
        os.listdir(tmp_path) == []
    )  # the pipeline makes the folder, when the data and the model are known good


@pytest.mark.parametrize("status", [0, 1])
def test_the_status_of_the_job_is_the_status_of_the_command(launch: Launch, status: int) -> None:
    assert launch(lambda config: status) == status


def test_a_configuration_error_in_the_job_is_one_line(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    def job(config: Config) -> int:
        raise ConfigError("data.root", "/nowhere", "a folder\nwith train/ and val/")

    assert launch(job) == 2
    assert capfd.readouterr().err == "error: data.root=/nowhere: a folder with train/ and val/\n"


def test_any_other_error_keeps_its_traceback(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    def job(config: Config) -> int:
        raise RuntimeError("a defect")

    with pytest.raises(SystemExit) as stop:
        launch(job)
    assert stop.value.code == 1
    printed = capfd.readouterr().err
    assert 'raise RuntimeError("a defect")' in printed
    assert "test_cli.py" in printed


def interrupted(config: Config) -> int:
    raise KeyboardInterrupt


def interrupted_in_lightning(config: Config) -> int:
    """What Trainer.fit makes of Ctrl-C."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(1)


@pytest.mark.parametrize("job", [interrupted, interrupted_in_lightning])
def test_an_interrupted_run_says_how_to_go_on(
    launch: Launch, capfd: pytest.CaptureFixture[str], job: Job
) -> None:
    assert launch(job) == 130
    assert capfd.readouterr().err == "interrupted: the same command with resume=auto continues\n"


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
    assert capfd.readouterr().err == "error: seed=1: any but 1\n"


def test_every_recipe_can_be_swept_over(launch: Launch) -> None:
    seen: list[str] = []

    launch(
        lambda config: seen.append(config.name), "-m", "recipe=glob(*)", "data.root=x", "model.checkpoint=y"
    )

    assert seen == RECIPES.split(", ")


def test_other_ranks_of_a_job_repeat_this_job_alone(launch: Launch) -> None:
    """Lightning starts ranks with `sys.argv`: composed again, it gives the same configuration."""
    seen: list[tuple[Config, list[str]]] = []

    launch(lambda config: seen.append((config, sys.argv[1:])), "-m", "seed=1,2", "name='it\\'s'")

    assert sys.argv[1:] == ["-m", "seed=1,2", "name='it\\'s'"]
    again: list[Config] = []
    for _, arguments in seen:
        assert launch(again.append, *arguments) == 0
    assert again == [config for config, _ in seen]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A run's folder as training leaves it."""
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
            "schedule.lr=1: no part of exporting a checkpoint, which can set ",
        ),
        (["checkpoint=CKPT", "backend=qnnpack"], "backend=qnnpack: no part of exporting a checkpoint"),
        (["checkpoint=CKPT", "export.opset=9"], "export.opset=9: 13 to 23"),
        (["checkpoint=nothing.ckpt"], "checkpoint=nothing.ckpt: a checkpoint written by train.py"),
        ([], "checkpoint=None: a checkpoint written by train.py"),
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


def test_an_export_without_the_saved_configuration_says_what_is_missing(
    launch: Launch, capfd: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    checkpoint.with_name("config.yaml").unlink()

    assert launch(no_job, f"checkpoint={checkpoint}", from_checkpoint=True) == 2
    assert capfd.readouterr().err.endswith("run/config.yaml is missing\n")


def _python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    ("script", "typed", "line"),
    [
        ("train.py", "recipe=vit", "error: recipe=vit: one of "),
        ("train.py", "schedule.lr=fast", "error: schedule.lr=fast: a value of type float"),
        (
            "export.py",
            "checkpoint=none.ckpt",
            "error: checkpoint=none.ckpt: a checkpoint written by train.py",
        ),
    ],
)
def test_the_scripts_run_from_any_folder(tmp_path: Path, script: str, typed: str, line: str) -> None:
    done = _python(str(ROOT / script), typed, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_a_mistake_shows_before_torch_is_imported(tmp_path: Path) -> None:
    done = _python("-X", "importtime", str(ROOT / "train.py"), "export.opset=12", cwd=tmp_path)

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "hydra" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "lightning", "onnxruntime")}


def test_help_and_cfg_are_hydras(tmp_path: Path) -> None:
    shown = _python(str(ROOT / "train.py"), "--cfg", "job", "schedule.lr=0.125", cwd=tmp_path)
    helped = _python(str(ROOT / "train.py"), "--help", cwd=tmp_path)

    assert (shown.returncode, helped.returncode) == (0, 0)
    assert "lr: 0.125" in shown.stdout
    assert "recipe: " in helped.stdout
    assert os.listdir(tmp_path) == []


RANKS = """
import sys
from pathlib import Path
import lightning
import torch
from qatkit.launch import main

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

    done = _python("ranks.py", "-m", "seed=1,2", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    for seed in (1, 2):
        folders = {(tmp_path / f"{seed}_{rank}_of_2").read_text() for rank in (0, 1)}
        assert len(folders) == 1
