"""Hydra's launcher for Slurm with another beginning and another end (`qatkit.config.slurm`); of the extra `slurm`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import submitit
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from omegaconf import OmegaConf, open_dict

from qatkit.config import compose, slurm, streams
from qatkit.run.find import output_dir
from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError

_OF_THE_EXECUTOR = ("submitit_folder", "max_num_timeout")


class Slurm(SlurmLauncher):  # type: ignore[misc]  # of a package without types
    """One array of jobs, all of whose ends are told."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Submits and waits. A run's folder is chosen now, so that one that is started again finds its own."""
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        calls = [
            (
                [*overrides, *self._folder(overrides, number)],
                "hydra.sweep.dir",
                number,
                f"job_{number}",
                Singleton.get_state(),
            )
            for number, overrides in zip(numbers, job_overrides, strict=True)
        ]
        try:
            jobs = self._executor().map_array(self, *zip(*calls, strict=True))
        except (submitit.core.utils.FailedJobError, subprocess.CalledProcessError, ValueError) as error:
            raise ConfigError(
                "launcher", "slurm", f"what Slurm takes ({' '.join(str(error).split())})"
            ) from error
        slurm.submitted(len(jobs), jobs[0], jobs[0].paths.folder)
        try:
            return slurm.results(jobs, numbers, job_overrides)
        except stopping.Stopped as stop:
            stop.where = "while the runs on Slurm go on"
            raise

    def _folder(self, overrides: Sequence[str], number: int) -> list[str]:
        """The override that names it; none where it is typed, or is that of a checkpoint."""
        node = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(node):
            del node["hydra"]
        if any(node[key] is not None for key in ("output_dir", "checkpoint", "onnx", "resume")):
            return []
        return [f"output_dir='{output_dir(compose.to_config(node), number).absolute()}'"]

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
        """One run, on a node of the cluster."""
        streams.prepare()
        compose.register()
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(
                number, signal.SIG_DFL
            )  # submitit's handlers: one does nothing, one writes no checkpoint
        with stopping.served():
            try:
                result: JobReturn = super().__call__(*arguments)
                return result
            except stopping.Stopped as stop:
                slurm.say(f"interrupted {stop.where}".rstrip())
                slurm.end(stop, self.params["max_num_timeout"])
                raise
