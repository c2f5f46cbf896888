"""Several processes that train one model. They start from the same checkpoint and end together.

    rank 0   calibration, searches ── last.ckpt of step 0 ── starts the others ── trains ──> verifies
    others                                 the same command ── read last.ckpt ── train ──> done

When the first process begins to train, Lightning starts the others by repeating the command line. Work that
depends on the clock or takes long (searches, calibration) is therefore done only once: the others read its
result as a resumed run does.

If a process dies, the others wait in a collective, with some backends forever. Lightning's own observer kills
all processes without a message. Here each process watches its parent and children, and the first process
reports what happened. Python calls no signal handler while it waits in torch's library, so a thread receives
the signal.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from qatkit.data import DataModule
from qatkit.run.folder import main_process
from qatkit.run.lock import at_work
from qatkit.run.loop.epoch_listener import Pruned
from qatkit.train.learner import Learner
from qatkit_verify import stopping
from qatkit_verify.errors import ConfigError

_EVERY = 0.2  # seconds between two checks
_LEAVING = 3.0  # seconds within which a process whose job is over ends by itself
_PATIENCE = 10.0  # seconds within which the dead process that caused a failed collective is noticed
_BEHIND = (
    30.0  # seconds that the first process may end after the others if a signal ended all at the same step
)
_A_CALL = 5.0  # seconds that a library call may delay a signal if the step need not be finished
_A_STEP = 60.0  # the same if the step is finished first
_NOBODY = 300.0  # seconds that the start times of a cluster's tasks may differ
PARENT = "QATKIT_PARENT"  # the process that started this one
_REFUSED = 2  # the status of a ConfigError
_STOPPED = {128 + number for number in stopping.SIGNALS}


def strategy_of(name: str, processes: int) -> Any:
    """Returns the strategy for Lightning's Trainer: `name`, or for DDP with several processes an object.

    The launcher of this object leaves watching the processes to this module.
    """
    if processes == 1 or name not in ("auto", "ddp", "ddp_find_unused_parameters_true"):
        return name
    return _Watched(find_unused_parameters=name == "ddp_find_unused_parameters_true")


def environment_of(processes: int) -> list[LightningEnvironment]:
    """Returns [Lightning's own environment] in a Slurm job whose tasks are not this run's processes; else [].

    Lightning treats every Slurm task as a rank. In a job of one task, the first process of a run of two would
    train without the other, on half of the images. In a job of four tasks, a run of one process would be
    refused.
    """
    tasks = os.environ.get("SLURM_NTASKS")
    alone = processes == 1 or tasks != str(processes)
    return [LightningEnvironment()] if tasks is not None and alone else []


class _Watched(DDPStrategy):
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)  # type: ignore[arg-type]


class _Launcher(_SubprocessScriptLauncher):
    """A launcher without Lightning's observer, since that also kills this process without a message."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[PARENT]
            _Family.children = list(self.procs)
        share_cores = bool(_Family.children) or PARENT in os.environ
        with part_of_cores(self.num_processes if share_cores else 1):
            return function(*args, **kwargs)


@contextmanager
def part_of_cores(processes: int) -> Iterator[None]:
    """Limits torch's threads within the context, so that all processes together use one thread per core.

    The previous number is restored, since only the first process continues after the training; Lightning's
    launcher does not restore it. Settings of the user or the cluster (OMP_NUM_THREADS, the cores of a task)
    are respected.
    """
    threads = torch.get_num_threads()
    if processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, threads // processes))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Family:
    """The processes that this one has started, and the number of signals it has received."""

    children: Sequence[subprocess.Popen[bytes]] = ()
    signals = 0


@contextmanager
def peers(several: bool) -> Iterator[None]:
    """Ends this process if another process of the run dies within the context; does nothing in a single-process run."""
    if not several:
        yield
        return
    over = threading.Event()
    look = _look_after_children if main_process() else _look_after_parent
    watch = threading.Thread(target=look, args=(over,), daemon=True)
    watch.start()
    try:
        with stopping.heard(partial(_end_by_signal, over)):
            yield
    except (ConfigError, Pruned):  # every process raised the same error, so no single one has failed
        raise
    except Exception:
        if main_process():
            watch.join(_PATIENCE)  # a collective may have failed: the dead process is noticed soon
        raise
    finally:
        over.set()


def _look_after_children(over: threading.Event) -> None:
    while not over.wait(_EVERY):
        for rank, child in enumerate(_Family.children, 1):
            status = child.poll()
            if status:
                # After a signal all processes end at the same step, and a diverging training diverges in all
                # of them, so this process may be about to end as well.
                own = {_REFUSED: _PATIENCE, **dict.fromkeys(_STOPPED, _BEHIND)}.get(status, 0.0)
                if not over.wait(own):
                    _end(rank, status)
                return


def _look_after_parent(over: threading.Event) -> None:
    parent = _parent()
    while not over.wait(_EVERY):
        if os.getppid() != parent:
            os._exit(1)


def _parent() -> int:
    """Returns the id of the process that started this one; that process may have ended already."""
    return int(os.environ.get(PARENT) or os.getppid())


def _end_by_signal(over: threading.Event, number: int) -> None:
    """Ends this process if no signal handler is called in time, since it may wait for processes that have died.

    A second SIGINT ends the process at once, as usual.
    """
    if _Family.signals and number == signal.SIGINT:
        os._exit(128 + number)
    _Family.signals += 1
    threading.Thread(target=_end_if_unheard, args=(over, number), daemon=True).start()


def _end_if_unheard(over: threading.Event, number: int) -> None:
    if over.wait(_A_STEP if stopping.waits() else _A_CALL) or stopping.wanted() is not None:
        return
    if main_process():
        text = (
            "interrupted while waiting for other processes: run the same command with resume=auto to continue"
        )
        print(f"\n{text}", file=sys.stderr, flush=True)
    _leave(128 + number)


def _end(rank: int, status: int) -> None:
    """Reports which process died, and ends all others, since they might wait for it forever."""
    number = -status if status < 0 else status - 128 if status in _STOPPED else 0
    how = f"was ended by {signal.Signals(number).name}" if number else f"ended with status {status}"
    print(
        f"\nerror: process {rank + 1} of {len(_Family.children) + 1} {how}, so this run ends; run the same command"
        " with resume=auto to continue from its last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    _leave(status if status > 0 else 1)


def _leave(status: int) -> None:
    """Exits at once and kills all processes that this one has started."""
    for child in _Family.children:
        if child.poll() is None:
            child.kill()
    os._exit(status)


def leave_none_behind() -> None:
    """Ends the processes that this one has started for a finished job, and forgets them.

    The next job of a sweep starts its own processes. After a successful job none are left.
    """
    for child in _Family.children:
        try:
            child.wait(_LEAVING)
        except subprocess.TimeoutExpired:  # it may wait for processes that have died
            child.kill()
            child.wait()
    _Family.children = ()


def start_together(
    module: Learner, data: DataModule, checkpoint: Path, steps: int, writer: CheckpointIO
) -> None:
    """Makes several processes start from one checkpoint: rank 0 writes one of step 0 if needed, the others wait.

    Args:
        module: the module before its first step.
        data: the data that it trains on.
        checkpoint: the path of the stage's checkpoint.
        steps: the number of steps of the whole training, on which the first learning rate depends.
        writer: the writer of checkpoints.
    """
    if not main_process():
        wait_for_first(checkpoint)
        return
    if checkpoint.is_file():
        return
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, max_steps=steps, limit_train_batches=0, limit_val_batches=0,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, plugins=[LightningEnvironment(), writer],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(checkpoint)


def wait_for_first(checkpoint: Path) -> None:
    """Waits, in every process but the first, until the first one has written the checkpoint with its choices.

    Raises:
        ConfigError: the first process has ended, or works in another folder.
        SystemExit: the process that started this one has ended.
    """
    parent, seen = _parent(), time.monotonic()
    while not main_process() and not checkpoint.is_file():
        stopping.check()
        if os.getppid() != parent:
            raise SystemExit(1)
        if at_work(checkpoint.parent) is not False:
            seen = time.monotonic()
        elif time.monotonic() - seen > _NOBODY:
            allowed = (
                "the folder in which the first process works; that process has ended or uses another folder"
            )
            raise ConfigError("output_dir", checkpoint.parent, allowed)
        time.sleep(_EVERY)
