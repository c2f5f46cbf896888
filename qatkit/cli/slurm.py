"""The launcher `launcher=slurm`: Hydra's submitit launcher with runs that resume and always report their end.

    here     one array of jobs ── waits, asking squeue ──> an Outcome per run, whatever happened to it
             interrupted, and typed again ──> waits for queued and running jobs, submits what is missing
    there    SIGTERM (preempted, requeued, cancelled)   ──> a checkpoint, then Slurm decides
             SIGUSR1, SIGUSR2 (the time limit is near)  ──> a checkpoint, then `scontrol requeue`
             started again                              ──> resumes in its folder from its last checkpoint

Hydra's own launcher raises an error at the first failed run and forgets the others. Without Slurm's
accounting it waits forever for a killed run. Submitit ignores SIGTERM.
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
from qatkit_verify.errors import ConfigError, counted, first_line
from qatkit_verify.installed import install_extra

LAUNCHER = "launcher=slurm"
_PLUGIN = "hydra_plugins.hydra_submitit_launcher"
HYDRAS = f"{_PLUGIN}.submitit_launcher.SlurmLauncher"
_POLL = 5.0  # seconds between two queries to Slurm
_PATIENCE = 60.0  # seconds after SIGTERM within which Slurm kills a process
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
    """Calls `take_over` if the command line asks for Slurm by name.

    Raises:
        ConfigError: Slurm is not available here, or there is nothing to submit.
    """
    asked = next((one for one in overrides if one in (LAUNCHER, "hydra/launcher=submitit_slurm")), None)
    if asked is None:
        return
    take_over(asked, multirun)


def take_over(asked: str, multirun: bool) -> None:
    """Replaces Hydra's launcher by that of `slurm_launcher`, since Hydra finds no launchers of other packages by name.

    Args:
        asked: the override that requests Slurm, with "slurm" or the user's own option of the group.
        multirun: whether the command line starts a sweep.

    Raises:
        ConfigError: Slurm is not available here, or there is nothing to submit.
    """
    key, _, value = asked.partition("=")
    if not multirun:
        command = Path(sys.argv[0]).name
        raise ConfigError(key, value, reason=f"Slurm only runs sweeps; add -m ({command} -m {asked} ...)")
    if importlib.util.find_spec("hydra_plugins") is None or importlib.util.find_spec(_PLUGIN) is None:
        allowed = f"local without the extra slurm (install it with {install_extra('slurm')})"
        raise ConfigError(key, value, allowed)
    missing = [name for name in ("sbatch", "srun", "squeue", "scontrol") if shutil.which(name) is None]
    if missing:
        allowed = (
            f"local on a machine without {', '.join(missing)}; run the command on "
            "a node that submits to the cluster"
        )
        raise ConfigError(key, value, allowed)
    from qatkit.cli.slurm_launcher import Slurm  # requires the extra

    Plugins.instance().class_name_to_class[HYDRAS] = Slurm


@dataclass(frozen=True)
class Queued:
    """A run that was submitted to Slurm and may have ended.

    Attributes:
        number, overrides: the number and the overrides of the run in the sweep.
        folder: the folder of the run; "" if the run itself chooses it.
        job: the job object of submitit.
    """

    number: int
    overrides: Sequence[str]
    folder: str
    job: Any


def results(runs: Sequence[Queued], sweep: str) -> dict[int, Outcome]:
    """Waits for the runs, records their outcomes for the sweep, and returns them by the runs' numbers.

    A failed run has an outcome as well and raises no error.

    Raises:
        Stopped: a signal ended the wait; runs that have not ended are reported with their current states.
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
    """Adds the outcomes of the runs that have ended to `told`, by number."""
    waiting = [run for run in runs if run.number not in told]
    states = states_of(waiting)
    for run in waiting:
        if (outcome := ended(run.job)) is None and states is not None and over(run.job, states):
            time.sleep(1)  # a result that was written in the meantime may become visible a moment later
            outcome = ended(run.job) or _lost(run.job, states)
        if outcome is not None:
            told[run.number] = outcome
            say(f"  {len(told)} of {len(runs)} done: run {run.number}, status {outcome.status}")


def _told_of(left: Sequence[Queued], count: int) -> tuple[str, str]:
    """Returns descriptions of where a sweep was interrupted, and of what the same command would do."""
    if not left:
        return "", "the same command reports the runs again without repeating any"
    jobs = arrays(left)
    return (
        f"while {len(left)} of {count} runs are on Slurm (job {', '.join(jobs)}), where they continue",
        f"the same command waits for them without repeating any; scancel {' '.join(jobs)} ends them",
    )


def _as_it_stands(run: Queued, states: Mapping[str, str]) -> Outcome:
    state = states.get(run.job.job_id, "state unknown").lower()
    word = {"pending": "queued"}.get(state, state)
    return Outcome(0, run.folder, going=f"{word}, job {run.job.job_id}")


def arrays(runs: Iterable[Queued]) -> list[str]:
    """Returns the job numbers of the Slurm arrays to which the runs belong, sorted."""
    return sorted({run.job.job_id.split("_")[0] for run in runs})


def states_of(runs: Iterable[Queued]) -> dict[str, str] | None:
    """Returns the states of the runs' jobs by job number, from squeue; None if it does not answer."""
    return _states(arrays(runs))


def over(job: Any, states: Mapping[str, str]) -> bool:
    """Returns whether a job has ended in Slurm, or is no longer known to it."""
    return states.get(job.job_id, "") in _OVER


def _states(jobs: Collection[str]) -> dict[str, str] | None:
    """Returns states by job number, also of jobs that ended recently; None if squeue does not answer."""
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
    """Returns the outcome of a run that has written a result or an exception, else None."""
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
    return Outcome(1, reason=f"Slurm ended the job: {state.lower() or 'job unknown'} ({job.paths.stderr})")


def end(stop: stopping.Stopped, restarts: int) -> None:
    """Ends a run on Slurm after its checkpoint is written, and requeues it unless Slurm does so.

    After a SIGTERM, Slurm kills the process, and requeues a preempted job but not a cancelled one. A process
    that ended before that would count as failed, so this one waits. If it is not killed, the signal was a
    warning like the others.

    Args:
        stop: the signal that ended the run.
        restarts: the allowed number of restarts.

    Raises:
        Stopped: Slurm itself, or the first task of the job, decides what happens to the run.
        ConfigError: the run has been restarted as often as allowed, or Slurm does not requeue it.
    """
    number = int(stop.code or 0) - 128
    if number == signal.SIGTERM:
        _sleep(_PATIENCE)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        _sleep(_PATIENCE)  # the first task acts for all of them
        raise stop
    job = _job()
    if (_states([job]) or {}).get(job) not in ("RUNNING", None):
        raise stop
    if _starts() >= restarts:
        allowed = (
            f"more than {restarts}, or a longer hydra.launcher.timeout_min; the job has used all its restarts"
        )
        raise ConfigError("hydra.launcher.max_num_timeout", restarts, f"{allowed} (stopped {stop.where})")
    say("queued again, to continue from the checkpoint")
    done = subprocess.run(["scontrol", "requeue", job], check=False, capture_output=True, text=True)
    if done.returncode > 0:  # below 0: the step ended together with this job, as requested
        reason = (
            f"Slurm did not requeue the job ({done.stderr.strip()}); run the same command with resume=auto"
        )
        raise ConfigError("launcher", "slurm", reason=reason) from stop
    _sleep(_PATIENCE)


def _job() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def _sleep(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(1)


def started_again() -> bool:
    """Returns whether this process is a restarted run on Slurm."""
    return _starts() > 0


def _starts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def submitted(count: int, job: Any, folder: Path) -> None:
    """Prints what was submitted, and how to end it."""
    array = job.job_id.split("_")[0]
    say(f"{counted(count, 'run')} submitted to Slurm, job {array}, logs in {folder}")
    say(
        "submitted runs continue if this command ends, and the same command finds them again; "
        f"scancel {array} ends them"
    )


def say(text: str) -> None:
    """Prints progress on stderr."""
    print(text, file=sys.stderr, flush=True)
