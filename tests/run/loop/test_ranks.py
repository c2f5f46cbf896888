"""Tests of runs of several processes: results like one process's, resuming with more or fewer, failures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rank
import torch
from command_line import ROOT
from tiny_run import tiny

from qatkit.config.schema import Config, DataConfig, ScheduleConfig, TrainerConfig
from qatkit.data import DataModule, digits
from qatkit.data.loading import EpochSampler
from qatkit.jobs import pipeline
from qatkit.jobs.checks import check_machine
from qatkit.run.loop.ranks import environment_of, part_of_cores
from qatkit_verify.errors import ConfigError

# Sums in another order differ in the last bit. Within this many steps, no value is so close to a
# rounding boundary that it becomes another integer; after one does, weights differ by a training step.
STEPS, HALF = 40, 20


def test_a_step_takes_the_same_images_however_distributed() -> None:
    """Checks steps of 12 images: 1 process with batches of 12, 3 with 4; accumulated: 2 with 3, 1 with 6.

    The last 7 of 103 images are left out.
    """
    steps = []
    for processes, batch in ((1, 12), (3, 4), (2, 3), (1, 6)):
        shares = [[i for _, i in EpochSampler(range(103), 5, r, processes, 12)] for r in range(processes)]
        share = 12 // processes
        count = len(shares[0]) // share
        batches = [[i for s in shares for i in s[k * share :][:share]] for k in range(count)]
        steps.append([*map(sorted, batches)])
        assert len(shares[0]) % batch == 0
    assert len(steps[0]) == 8 and all(one == steps[0] for one in steps)


def test_ranks_go_on_behind_the_images_that_all_have_seen() -> None:
    whole = [i for _, i in EpochSampler(range(103), 5, 0, 1, 12)]
    late = [EpochSampler(range(103), 5, r, 2, 12) for r in range(2)]
    for one in late:
        one.skip = 36
    assert sorted(i for one in late for _, i in one) == sorted(whole[36:])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            200,
            r"data\.batch_size=32: expected at most 7, since a step uses 200 batches .* training images is 1437",
        ),
        (2000, r"data\.batch_size=32: a step uses 2000 batches .*; use fewer processes"),
    ],
)
def test_more_processes_than_images_are_refused(batches: int, message: str) -> None:
    data = DataModule(DataConfig(image_size=8, batch_size=32), digits, 0)
    assert data.steps_per_epoch(4) == 1437 // 128
    with pytest.raises(ConfigError, match=message):
        data.steps_per_epoch(batches)


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Returns the quantizer and the folder with the final state of a one-process run with batches of 64."""
    folder = tmp_path_factory.mktemp("alone")
    rank.finish(rank.start(folder, STEPS, 1, batch=64, quantizer=request.param))
    return request.param, folder


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "myjob",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize("tasks", [1, 4])
def test_a_run_in_a_slurm_job_of_other_tasks_trains_by_itself(
    tasks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (SLURM | {"SLURM_NTASKS": str(tasks), "SLURM_JOB_NODELIST": "localhost"}).items():
        monkeypatch.setenv(key, value)
    config = tiny(tmp_path / "run", schedule=ScheduleConfig(epochs=0, float_epochs=1))
    config.verify.max_drop = None
    assert pipeline.train(config) == 0
    for processes in (1, 2, 4):
        assert bool(environment_of(processes)) != (processes == tasks > 1)


def test_a_slurm_job_of_too_few_tasks_for_its_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(trainer=TrainerConfig(accelerator="cpu", devices=2, num_nodes=2), output_dir="mine")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(
        ConfigError, match=r"trainer\.devices=2: .*submit the Slurm job with --ntasks-per-node=2"
    ):
        check_machine(config)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    check_machine(config)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    with pytest.raises(
        ConfigError,
        match=r"trainer\.num_nodes=2: the Slurm job has SLURM_NTASKS=2 instead of 4 \(trainer.devices on each node\)",
    ):
        check_machine(config)


def test_processes_of_one_machine_share_its_cores_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for processes, threads in ((1, 4), (2, 2), (4, 1), (8, 1)):
            with part_of_cores(processes):
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        with part_of_cores(2):
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Checks that the states of two ranks are bit-identical."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def close(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, bound: float = 1e-5, told: float = 1e-5
) -> None:
    """Checks that states agree: weights, biases and learned scales within `bound`, the rest within `told`.

    Where ranges follow the batches, a kernel for another batch size may change the last bit of a range and so
    of the scale. An activation may then cross a rounding boundary, which shows in the next ranges and means.
    """
    for name, value in one.items():
        if not name.endswith(("num_batches_tracked", "batches")):
            most = bound if name.endswith(("weight", "bias", ".step")) else told
            assert torch.allclose(value.double(), other[name].double(), rtol=0, atol=most), name


@pytest.mark.parametrize(
    "quantizer",
    [pytest.param(one, marks=pytest.mark.slow) if one == "lsq" else one for one in rank.QUANTIZERS],
)
def test_two_processes_with_four_images_are_one_with_eight(quantizer: str, tmp_path: Path) -> None:
    rank.forked(tmp_path, 6, 8, quantizer)
    first, second = rank.states(tmp_path / "2", 2)
    equal(first, second)
    assert rank.images(tmp_path / "2", 2) == rank.images(tmp_path / "1", 1)
    close(first, rank.states(tmp_path / "1", 1)[0])
    learned = [name for name in first if name.endswith(".step")]
    assert bool(learned) == (quantizer == "lsq")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("alone", rank.QUANTIZERS, indirect=True)
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_are_one_with_the_summed_batch(
    processes: int, alone: tuple[str, Path], tmp_path: Path
) -> None:
    quantizer, whole = alone
    rank.finish(rank.start(tmp_path, STEPS, processes, batch=64 // processes, quantizer=quantizer))
    first, *others = rank.states(tmp_path, processes)
    for other in others:
        equal(first, other)
    assert rank.images(tmp_path, processes) == rank.images(whole, 1)
    close(first, rank.states(whole, 1)[0], told=1e-5 if quantizer == "lsq" else 1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("alone", rank.QUANTIZERS, indirect=True)
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 32, 1), (1, 64, 1)), ((1, 64, 1), (2, 32, 1)), ((2, 32, 1), (1, 32, 2))],
    ids=["2 to 1", "1 to 2", "2 to 1, accumulated"],
)
def test_a_run_goes_on_with_other_processes(
    before: Any, after: Any, alone: tuple[str, Path], tmp_path: Path
) -> None:
    seen, (quantizer, folder) = [], alone
    for (processes, batch, accumulate), more in ((before, {"dies": HALF}), (after, {})):
        given = {"batch": batch, "accumulate": accumulate, "quantizer": quantizer, **more}
        ranks = rank.start(tmp_path, STEPS, processes, **given)
        if more:
            for one in ranks:
                one.communicate(timeout=600)
        else:
            rank.finish(ranks)
        seen += rank.images(tmp_path, processes, accumulate)
    assert seen == rank.images(folder, 1)
    weights, whole = rank.states(tmp_path, 1)[0], rank.states(folder, 1)[0]
    compared = [one for one in whole if one.endswith(("weight", ".step"))]
    assert any(one.endswith(".step") for one in compared) == (quantizer == "lsq")
    # With accumulated batches, a BatchNorm normalizes by half of the images, and learned scales follow it.
    bound = 3e-2 if after[2] > 1 and quantizer == "lsq" else 1e-2
    for name in compared:
        found, wanted = _without_deviation(weights, name), _without_deviation(whole, name)
        assert (found - wanted).abs().max() <= bound * wanted.abs().max(), name


def _without_deviation(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Returns a weight, or a learned scale times the running σ of its BatchNorm, if it has one.

    σ is updated once per batch, so twice per step where two batches are accumulated.
    """
    owner, _, rest = name.rpartition("weight_fake_quant.step")
    variance = state.get(f"{owner}bn.running_var") if owner and not rest else None
    return state[name] if variance is None else state[name] * (variance + 1e-5).sqrt()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learned_scales_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    """Checks a model with folded BatchNorms; the tests above train them.

    Only 8 steps are compared with one process. Later, the last bit of a weight may move a value to another
    integer (on one CPU in the 15th step), which changes the learned scales: after 50 steps, the states are
    9e-5 apart. The two processes are compared with each other after 40 steps, too.
    """
    settings = {"quantizer": "lsq", "batch_norm": "fold"}
    for folder, processes, steps in (("one", 1, 8), ("two", 2, 8), ("long", 2, STEPS)):
        (tmp_path / folder).mkdir()
        rank.finish(rank.start(tmp_path / folder, steps, processes, batch=64 // processes, **settings))
    (whole,) = rank.states(tmp_path / "one", 1)
    assert any(name.endswith("step") for name in whole)
    for folder in ("two", "long"):
        first, second = rank.states(tmp_path / folder, 2)
        equal(first, second)
        if folder == "two":
            close(first, whole, bound=1e-6, told=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_continues_after_a_distributed_float_training(tmp_path: Path) -> None:
    """Checks that the run ends well although only the first process works between the trainings."""
    done = _train(tmp_path, "model.name=tiny_run.Net", "verify.max_drop=null", "verify.latency_runs=3")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model.int8.onnx").is_file()


_DIES = """
import os
from tiny_run import Net as _Net

class Net(_Net):
    def forward(self, x):
        if os.environ.get("LOCAL_RANK") == "1" and self.training and len(x) == 16:
            os.kill(os.getpid(), 9)
        return super().forward(x)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_dies_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "mortal.py").write_text(_DIES)
    start = time.monotonic()
    done = _train(tmp_path, "model.name=mortal.Net")
    assert done.returncode == 1 and time.monotonic() - start < 400
    assert "error: process 2 of 2 was ended by SIGKILL" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("diverges", ["schedule.float_lr", "schedule.lr"])
def test_a_sweep_goes_on_behind_a_training_that_diverged(diverges: str, tmp_path: Path) -> None:
    """Checks divergence found by every process and by the first one alone: no process is left running."""
    done = _train(
        tmp_path, "-m", f"{diverges}=1e9,0.05", "model.name=tiny_run.Net", "verify.max_drop=null",
        "verify.latency_runs=3", "schedule.float_epochs=2", f"hydra.sweep.dir={tmp_path}", output_dir=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"error: {diverges}=1000000000.0: expected a smaller value" in done.stderr, done.stderr
    assert "this run ends" not in done.stderr and "Traceback" not in done.stderr
    table = done.stdout[done.stdout.index("sweep of 2 runs") :]
    assert " done " in table, table
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert not left.split()


_THEIRS = """
import os
from qatkit.data import digits

def load(root, download, seed):
    open(f"rank{os.environ.get('LOCAL_RANK', '0')}", "a").close()
    return digits(root, download, seed)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["on the path", "beside a script"])
def test_a_source_of_the_users_own_is_found_by_every_process(place: str, tmp_path: Path) -> None:
    """Checks a module that only a relative PYTHONPATH leads to, and one that only a script's folder has."""
    folder = tmp_path / ("theirs" if place == "on the path" else "scripts")
    folder.mkdir()
    (folder / "mine.py").write_text(_THEIRS)
    script = ROOT / "train.py"
    if place == "beside a script":
        script = Path("scripts") / "begin.py"
        text = "import sys\nfrom qatkit.cli.scripts import train\nif __name__ == '__main__':\n    sys.exit(train())\n"
        (tmp_path / script).write_text(text)
    typed = (
        "data.source=mine.load",
        "model.name=tiny_run.Net",
        "verify.max_drop=null",
        "verify.latency_runs=3",
    )
    done = _train(tmp_path, *typed, "schedule.max_steps=2", script=script, path="theirs")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank0").is_file() and (tmp_path / "rank1").is_file()
    assert (tmp_path / "run" / "model.int8.onnx").is_file()


def _train(
    folder: Path,
    *typed: str,
    output_dir: bool = True,
    script: Path = ROOT / "train.py",
    path: str | Path = "",
) -> subprocess.CompletedProcess[str]:
    """Runs two processes on digits: a float training, then all other stages."""
    places = [path or folder, ROOT / "tests", ROOT, ROOT / "packages" / "verify"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, places))}
    common = [
        "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.progress=false",
        "data.image_size=8", "data.batch_size=16", "data.workers=0", "schedule.float_epochs=1", "schedule.epochs=1",
        *([f"output_dir={folder / 'run'}"] if output_dir else []),
    ]  # fmt: skip
    command = [sys.executable, str(script), *typed, *common]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
