"""Tests of Ctrl-C and a cluster's signals: a run ends at its next step, says how to resume, and resumes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command_line import FRESH, ROOT, Launch
from tiny_run import report_of, sha256, weights_of

from qatkit.config.schema import Config
from qatkit.jobs import pipeline
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError

STEPS = 1437 // 8
TINY = ["trainer=cpu", "model.name=tiny_run.Net", "data.image_size=8", "data.batch_size=8", "calibration.images=64",
        "schedule.epochs=1", "schedule.float_epochs=0", "trainer.progress=false", "trainer.checkpoint_every=1000",
        "verify.latency_runs=2", "verify.max_drop=null", "data.test_images=64"]  # fmt: skip
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, launch: Launch) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert launch(pipeline.train, f"output_dir={folder}", *TINY) == 0
    return folder


def signalled_at(step: int, number: int) -> Callable[[Config], int]:
    """Returns a job that receives a signal at `step` of its training."""

    class Module(QATModule):
        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
            if self.trainer.global_step == step:
                os.kill(os.getpid(), number)
            return super().training_step(batch, index)

    return lambda config: pipeline.train(config, Module)


def test_a_signal_in_training_keeps_the_step(
    launch: Launch, tmp_path: Path, uninterrupted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Checks signals at steps where no checkpoint is due."""
    command = [f"output_dir={tmp_path / 'run'}", "resume=auto", *TINY]
    for times, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
        capfd.readouterr()
        assert launch(signalled_at(40 * times, number), *command) == 128 + number

        said = capfd.readouterr().err.splitlines()
        step = 40 * times + 1
        assert said[-1] == (
            f"interrupted at step {step} of {STEPS}: run the same command with resume=auto to continue"
        )
        assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["global_step"] == step
        assert not list((tmp_path / "run").glob(".*"))

    assert launch(pipeline.train, *command) == 0
    ours, theirs = (weights_of(folder / "last.ckpt") for folder in (tmp_path / "run", uninterrupted))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sha256(tmp_path / "run" / "model.int8.onnx") == sha256(uninterrupted / "model.int8.onnx")
    assert report_of(tmp_path / "run")["notes"][0] == "resumed from last.ckpt"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_elsewhere_ends_the_run_where_it_is(
    launch: Launch, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def job(config: Config) -> int:
        with contextlib.suppress(SystemExit):  # other code swallows it
            os.kill(os.getpid(), number)
            time.sleep(10)
        return pipeline.train(config)

    before = signal.getsignal(number)
    assert launch(job, *TINY) == 128 + number
    assert signal.getsignal(number) is not before  # still handled until the process ends
    assert capfd.readouterr().err.splitlines()[-1] == (
        "interrupted in export first: run the same command with resume=auto to continue"
    )


def test_a_sweep_ends_with_the_job_that_was_interrupted(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def job(config: Config) -> int:
        seen.append(config.seed)
        if config.seed == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert launch(job, "-m", "seed=0,1,2") == 128 + signal.SIGTERM
    assert seen == [0, 1]
    assert "interrupted in job 1 of the sweep" in capfd.readouterr().err


def test_nothing_is_served_outside_of_the_command_line(launch: Launch) -> None:
    """Checks that a command keeps an application's own handler and leaves none of its own behind."""
    before = [signal.getsignal(number) for number in SIGNALS]
    own = signal.signal(signal.SIGTERM, lambda *_: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert launch(lambda config: int(signal.getsignal(signal.SIGTERM) is not handler)) == 0
    finally:
        signal.signal(signal.SIGTERM, own)
    assert [signal.getsignal(number) for number in SIGNALS] == before


@contextlib.contextmanager
def started(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a run in its own process group, as a shell does."""
    with subprocess.Popen(
        [*FRESH, sys.executable, str(ROOT / "train.py"), f"output_dir={folder}", *TINY, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")},
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


@pytest.mark.slow  # processes
@pytest.mark.parametrize("number", SIGNALS)
def test_processes_that_load_images_leave_a_signal_to_the_run(tmp_path: Path, number: int) -> None:
    """Checks a signal to every process of the group, as sent by a terminal's Ctrl-C and by clusters."""
    long = ("schedule.epochs=100", "trainer.checkpoint_every=5", "data.workers=2")
    with started(tmp_path / "run", *long) as process:
        wait_for(tmp_path / "run" / "last.ckpt", process)
        os.killpg(process.pid, number)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said and "interrupted at step" in said.splitlines()[-1]


@pytest.mark.slow  # processes
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\nfrom qatkit_verify import stopping\n"
        "with stopping.served():\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally:\n        os.kill(os.getpid(), signal.SIGINT)\n        print('late', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "made", [ImportError("initialization failed"), ConfigError("model.name", "x", "another")]
)
def test_an_exception_that_is_made_of_a_signal_is_no_mistake(
    launch: Launch, capfd: pytest.CaptureFixture[str], made: Exception
) -> None:
    """Checks exceptions that a signal causes in other code, such as a C module whose import it interrupts."""

    def job(_: Config) -> int:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        raise made

    assert launch(job, *TINY) == 128 + signal.SIGTERM
    said = capfd.readouterr().err
    assert (
        "Traceback" not in said and said == "interrupted: run the same command with resume=auto to continue\n"
    )


def test_ctrl_c_during_the_import_of_the_command_ends_in_a_line(tmp_path: Path) -> None:
    started = """
import os, signal, sys
class AtHydra:
    def find_spec(self, name, *_):
        if name == "hydra":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtHydra())
from qatkit.cli.scripts import train
sys.exit(train())
"""

    done = subprocess.run(
        [sys.executable, "-c", started], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted before the command started\n"
    assert not list(tmp_path.iterdir())
