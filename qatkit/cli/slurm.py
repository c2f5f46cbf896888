"""`launcher=slurm`: Hydra's submitit launcher, with runs that go on after a preemption and tell how they ended.

    here     one array of jobs ── waits, asking squeue ──> an Outcome a run, whatever became of it
             interrupted, and typed again ──> waits for those that are queued or at work, submits what is missing
    there    SIGTERM (preempted, requeued, cancelled)   ──> a checkpoint, then Slurm decides
             SIGUSR1, SIGUSR2 (the time limit is near)  ──> a checkpoint, then `scontrol requeue`
             started again                              ──> goes on in its folder from its last checkpoint

Hydra's own launcher raises at the first run that failed, forgets the others and waits for ever, where there is no
accounting, for one that was killed; submitit passes SIGTERM over.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus

from qatkit.config.sweep import Outcome, add
from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError, first_line

LAUNCHER = "launcher=slurm"
_PLUGIN = "hydra_plugins.hydra_submitit_launcher"
HYDRAS = f"{_PLUGIN}.submitit_launcher.SlurmLauncher"
_POLL = 5.0  # seconds between two questions to Slurm
_PATIENCE = 60.0  # seconds in which Slurm kills what it has sent a SIGTERM to
_OVER = (
    "COMPLETED",
    "FAILED",
    "TIMEOUT",
    "CANCELLED",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "BOOT_FAIL",
    "DEADLINE",
    "",
)


def prepare(overrides: Sequence[str], multirun: bool) -> None:
    """Where the command line asks for Slurm by its name: `take_over`.

    Raises:
        ConfigError: there is none here, or nothing that could be sent to it.
    """
    asked = next((one for one in overrides if one in (LAUNCHER, "hydra/launcher=submitit_slurm")), None)
    if asked is None:
        return
    take_over(asked, multirun)


def take_over(asked: str, multirun: bool) -> None:
    """Puts the launcher of `slurm_launcher` in the place of Hydra's, which takes none from outside of its package by
    name.

    Args:
        asked: the override that asks for Slurm, which may be an option of the user's own.

    Raises:
        ConfigError: there is none here, or nothing that could be sent to it.
    """
    key, _, value = asked.partition("=")
    if not multirun:
        raise ConfigError(key, value, f"-m in front of it (train.py -m {asked} ...)")
    if importlib.util.find_spec("hydra_plugins") is None or importlib.util.find_spec(_PLUGIN) is None:
        raise ConfigError(key, value, "local without the extra slurm (install it with uv sync --extra slurm)")
    missing = [name for name in ("sbatch", "srun", "squeue", "scontrol") if shutil.which(name) is None]
    if missing:
        allowed = (
            f"local where there is no {', '.join(missing)}: type it on a machine that submits to the cluster"
        )
        raise ConfigError(key, value, allowed)
    from qatkit.cli.slurm_launcher import Slurm  # needs the extra

    Plugins.instance().class_name_to_class[HYDRAS] = Slurm


@dataclass(frozen=True)
class Queued:
    """A run that Slurm has.

    Attributes:
        number, overrides: in the sweep.
        folder: of the run; "" where it finds that by itself.
        job: submitit's.
    """

    number: int
    overrides: Sequence[str]
    folder: str
    job: Any


def results(runs: Sequence[Queued], sweep: str) -> dict[int, Outcome]:
    """Waits for the runs and returns an `Outcome` of each; none of them raises.

    A signal ends the waiting: runs that have not ended are reported as they stand.
    """
    told: dict[int, Outcome] = {}
    try:
        while len(told) < len(runs):
            stopping.check()
            _look(runs, told)
            if len(told) < len(runs):
                time.sleep(_POLL)
    except stopping.Stopped as stop:
        _look(runs, told)
        left = {run.number: run for run in runs if run.number not in told}
        stop.where, stop.again = _told_of(list(left.values()), len(runs))
        states = states_of(left.values()) or {}
        told |= {number: _as_it_stands(run, states) for number, run in left.items()}
        raise
    finally:
        stopping.wait(True)
        for run in runs:
            if run.number in told:
                add(replace(told[run.number], number=run.number, overrides=tuple(run.overrides), sweep=sweep))
        stopping.wait(False)
    return told


def _look(runs: Sequence[Queued], told: dict[int, Outcome]) -> None:
    """Adds those that have ended, by number."""
    waiting = [run for run in runs if run.number not in told]
    states = states_of(waiting)
    for run in waiting:
        if (outcome := ended(run.job)) is None and states is not None and over(run.job, states):
            time.sleep(1)  # a result that was written in between may take a moment to be seen
            outcome = ended(run.job) or _lost(run.job, states)
        if outcome is not None:
            told[run.number] = outcome
            say(f"  {len(told)} of {len(runs)} done: run {run.number}, status {outcome.status}")


def _told_of(left: Sequence[Queued], count: int) -> tuple[str, str]:
    """Where a sweep was interrupted, and what the same command would do."""
    if not left:
        return "", "the same command reports the runs again, and repeats none"
    jobs = arrays(left)
    return (
        f"while {len(left)} of {count} runs are on Slurm, job {', '.join(jobs)}, and go on there",
        f"the same command waits for them and repeats none; scancel {' '.join(jobs)} ends them",
    )


def _as_it_stands(run: Queued, states: Mapping[str, str]) -> Outcome:
    state = states.get(run.job.job_id, "state unknown").lower()
    word = {"pending": "queued"}.get(state, state)
    return Outcome(0, run.folder, going=f"{word}, job {run.job.job_id}")


def arrays(runs: Iterable[Queued]) -> list[str]:
    """The numbers by which Slurm knows them, of an array one."""
    return sorted({run.job.job_id.split("_")[0] for run in runs})


def states_of(runs: Iterable[Queued]) -> dict[str, str] | None:
    """What squeue says of their jobs; None where it does not answer."""
    return _states(arrays(runs))


def over(job: Any, states: Mapping[str, str]) -> bool:
    """Whether Slurm is done with a job, or knows it no more."""
    return states.get(job.job_id, "") in _OVER


def _states(jobs: Collection[str]) -> dict[str, str] | None:
    """What squeue says of each job, those included that ended a while ago; None where it does not answer."""
    if not jobs:
        return {}
    command = ["squeue", "-h", "-a", "-r", "-t", "all", "-o", "%i %T", "-j", ",".join(jobs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    pairs = (line.split() for line in done.stdout.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def ended(job: Any) -> Outcome | None:
    """Of a run that has left a result: what it returned, or the exception of a defect; None of another."""
    if not job.paths.result_pickle.exists():
        return None
    found, result = job._get_outcome_and_result()
    if found == "error":
        return Outcome(1, reason=f"{str(result).strip().splitlines()[-1]} ({job.paths.stderr})")
    if result.status == JobStatus.FAILED:
        return Outcome(1, reason=f"{first_line(result._return_value)} ({job.paths.stderr})")
    returned: Outcome = result.return_value
    return returned


def _lost(job: Any, states: Mapping[str, str]) -> Outcome:
    state = states.get(job.job_id, "")
    return Outcome(1, reason=f"Slurm ended it: {state.lower() or 'job unknown'} ({job.paths.stderr})")


def end(stop: stopping.Stopped, restarts: int) -> None:
    """In the run, once its checkpoint is written: has it queued again where Slurm does not do that by itself.

    A SIGTERM is followed by a kill, and Slurm queues the job again or not, as it was preempted or cancelled; a
    process that ends before would be one that failed. Where no kill comes, the signal was a warning like the others.

    Args:
        stop: the signal that ended the run.
        restarts: that are allowed.

    Raises:
        ConfigError: it was started again as often as allowed.
    """
    number = int(stop.code or 0) - 128
    if number == signal.SIGTERM:
        _sleep(_PATIENCE)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        _sleep(_PATIENCE)  # the first task speaks for all of them
        raise stop
    job = _job()
    if (_states([job]) or {}).get(job) not in ("RUNNING", None):
        raise stop
    if _starts() >= restarts:
        allowed = f"more than {restarts}, or a longer hydra.launcher.timeout_min: it was started again as often already"
        raise ConfigError("hydra.launcher.max_num_timeout", restarts, f"{allowed} (stopped {stop.where})")
    say("queued again, to go on from there")
    done = subprocess.run(["scontrol", "requeue", job], check=False, capture_output=True, text=True)
    if done.returncode > 0:  # below 0: ended with this job, as it asked for
        raise ConfigError(
            "launcher", "slurm", f"a cluster whose jobs may be queued again ({done.stderr.strip()})"
        ) from stop
    _sleep(_PATIENCE)


def _job() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def _sleep(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(1)


def started_again() -> bool:
    """Whether this process is a run on Slurm that was begun before."""
    return _starts() > 0


def _starts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def submitted(count: int, job: Any, folder: Path) -> None:
    """Says what was submitted, and how to end it."""
    array = job.job_id.split("_")[0]
    say(f"{count} runs submitted to Slurm, job {array}, logs in {folder}")
    say(f"they go on without this command, which finds them again; scancel {array} ends them")


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
