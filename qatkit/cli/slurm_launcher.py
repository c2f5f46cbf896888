"""Hydra's launcher for Slurm with a changed start and end of each run (`qatkit.cli.slurm`); requires extra `slurm`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import OmegaConf, open_dict

from qatkit.cli import slurm
from qatkit.config import compose
from qatkit.config.quoting import quoted
from qatkit.config.schema import Config
from qatkit.config.sweep import Outcome
from qatkit.config.sweep_file import Known, SweepFile, sweep_file
from qatkit.run import streams
from qatkit.run.find import begun_as, place
from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError

_OF_THE_EXECUTOR = ("submitit_folder", "max_num_timeout")


class Slurm(SlurmLauncher):  # type: ignore[misc]  # from a package without types
    """A launcher that submits one array of jobs and reports the end of every job."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submits all runs except those of an earlier launch (`_there`); returns the outcomes of all runs."""
        assert self.config is not None
        folder = Path(str(self.config.hydra.sweep.dir)).absolute()
        file = sweep_file(folder)
        assert file is not None
        jobs = dict(enumerate(job_overrides, initial_job_idx))
        configs = {number: self._config(overrides) for number, overrides in jobs.items()}
        there = _there(file, jobs, configs)
        stopping.wait(True)  # so that all submitted runs are recorded
        try:
            runs = [*there, *self._submitted(file, jobs, configs, {run.number for run in there})]
        finally:
            stopping.wait(False)
        told = slurm.results(sorted(runs, key=lambda run: run.number), str(folder))
        return [
            JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=told[number])
            for number, overrides in jobs.items()
        ]

    def _submitted(
        self,
        file: SweepFile,
        jobs: Mapping[int, Sequence[str]],
        configs: Mapping[int, Config | None],
        without: set[int],
    ) -> list[slurm.Queued]:
        """Submits the runs whose numbers are not in `without`, and returns them.

        The folder of a run is chosen before its start if it can be, so that a restarted run finds it.
        """
        new = [number for number in jobs if number not in without]
        if not new:
            return []
        folders = {number: _folder(configs[number], number) for number in new}
        calls = [
            (
                [*jobs[number], *_naming(configs[number], folders[number])],
                "hydra.sweep.dir",
                number,
                f"job_{number}",
                Singleton.get_state(),
            )
            for number in new
        ]
        try:
            made = self._executor().map_array(self, *zip(*calls, strict=True))
        except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError, ValueError) as error:
            reason = f"Slurm rejected the jobs ({' '.join(str(error).split())}); check hydra.launcher"
            raise ConfigError("launcher", "slurm", reason=reason) from error
        slurm.submitted(len(made), made[0], made[0].paths.folder)
        queued = []
        for number, job in zip(new, made, strict=True):
            known = Known(folders[number], job.job_id, str(job.paths.folder))
            file.note(jobs[number], known)
            queued.append(_queued(number, jobs[number], known))
        return queued

    def _config(self, overrides: Sequence[str]) -> Config | None:
        """Returns a run's configuration; None with checkpoint, onnx or resume=FILE, where the folder is unknown."""
        assert self.hydra_context is not None
        node = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(node):
            del node["hydra"]
        if node["checkpoint"] is not None or node["onnx"] is not None or node["resume"] not in (None, "auto"):
            return None
        return compose.to_config(node)

    def _executor(self) -> submitit.AutoExecutor:
        own = {key: self.params[key] for key in _OF_THE_EXECUTOR}
        common = set(OmegaConf.structured(BaseQueueConf).keys())
        executor = submitit.AutoExecutor(
            cluster="slurm", folder=own["submitit_folder"], slurm_max_num_timeout=own["max_num_timeout"]
        )
        asked = {key: value for key, value in self.params.items() if key not in own}
        executor.update_parameters(
            **{key if key in common else f"slurm_{key}": value for key, value in asked.items()}
        )
        return executor

    def __call__(self, *arguments: Any) -> JobReturn:
        """Executes one run on a node of the cluster."""
        streams.prepare()
        compose.register()
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(
                number, signal.SIG_DFL
            )  # instead of submitit's handlers: one does nothing, the other writes no checkpoint
        with stopping.served():
            try:
                result: JobReturn = super().__call__(*arguments)
                return result
            except stopping.Stopped as stop:
                slurm.say(f"interrupted {stop.where}".rstrip())
                slurm.end(stop, self.params["max_num_timeout"])
                raise


def _folder(config: Config | None, number: int) -> str:
    return "" if config is None else str(place(config, number).absolute())


def _naming(config: Config | None, folder: str) -> list[str]:
    """Returns the override that sets a run's `output_dir`; [] if it is set or the folder is unknown."""
    if config is None or config.output_dir is not None:
        return []
    return [f"output_dir={quoted(folder)}"]


def _queued(number: int, overrides: Sequence[str], known: Known) -> slurm.Queued:
    job = submitit.SlurmJob(folder=known.logs, job_id=known.job)  # for its first task, which reports for all
    return slurm.Queued(number, overrides, known.folder, job)


def _there(
    file: SweepFile, jobs: Mapping[int, Sequence[str]], configs: Mapping[int, Config | None]
) -> list[slurm.Queued]:
    """Returns the runs of an earlier launch of the same sweep that need not be submitted again.

    They have the same configuration, and are queued, running, or finished without a failure. For a completed
    sweep there are none without resume=auto.

    Raises:
        ConfigError: Slurm does not report the states of the runs.
    """
    queued = [
        _queued(number, overrides, known)
        for number, overrides in jobs.items()
        if (known := file.known(overrides)).job and _wanted(file, configs[number], known)
    ]
    ended = {run.number: slurm.ended(run.job) for run in queued}
    states = slurm.states_of([run for run in queued if ended[run.number] is None])
    if states is None:
        reason = (
            f"squeue does not answer, and {file.path} lists runs of this sweep that were submitted; "
            "run the command again later"
        )
        raise ConfigError("launcher", "slurm", reason=reason)
    there = [run for run in queued if _needs_no_other(ended[run.number], run, states)]
    if there:
        numbers = ", ".join(slurm.arrays(there))
        slurm.say(
            f"{len(there)} of {len(jobs)} runs were submitted before, job {numbers}, and are not submitted again"
        )
    return there


def _needs_no_other(ended: Outcome | None, run: slurm.Queued, states: Mapping[str, str]) -> bool:
    """Returns whether a run has finished without a failure, or is queued or running on Slurm."""
    return not slurm.over(run.job, states) if ended is None else not ended.reason


def _wanted(file: SweepFile, config: Config | None, known: Known) -> bool:
    resumes = config is not None and config.resume == "auto"
    same = config is None or not known.folder or begun_as(config, Path(known.folder))
    return same and (resumes or not file.ended)
