"""One process of a distributed training: `python rank.py FOLDER STEPS PROCESSES KEY=VALUE...`, once per rank.

It fine-tunes the network of `tiny_run` on digits after the same calibration in every process. In FOLDER it
writes a checkpoint, the final state (state.RANK.pt) and the images of each batch (images.RANK.json).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_only
from tiny_run import Net, tiny

from qatkit.config.schema import Config, DataConfig, QuantizerConfig, ScheduleConfig, TrainerConfig
from qatkit.run.build import data_of, qat_module
from qatkit.run.loop.fit import Stage, fit
from qatkit.train.learner import Batch
from qatkit.train.module import QATModule

ROOT = Path(__file__).parents[1]
_FORK = "fork"  # replaces the folder on the command line
QUANTIZERS = {
    "fake_quantize": QuantizerConfig(),
    "lsq": QuantizerConfig(
        "qatkit.quant.learned.lsq.LSQFakeQuantize", "qatkit.quant.learned.lsq.LSQWeightFakeQuantize"
    ),
}


def start(folder: Path, steps: int, processes: int, **settings: Any) -> list[subprocess.Popen[str]]:
    """Starts the ranks of a training of `steps` steps in `folder`."""
    typed = [f"{key}={value}" for key, value in settings.items()]
    paths = [str(ROOT), str(ROOT / "packages" / "verify"), str(ROOT / "tests")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(processes),
    }
    command = [sys.executable, __file__, str(folder), str(steps), str(processes), *typed]
    return [
        subprocess.Popen(
            command,
            env={**environment, "NODE_RANK": "0", "LOCAL_RANK": str(rank)} if processes > 1 else environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]


def forked(folder: Path, steps: int, images: int, quantizer: str) -> None:
    """Trains with `images` images per step: with one process in folder/1 and with two in folder/2.

    All are forks of one new process that has imported everything but trained nothing.
    """
    command = [sys.executable, __file__, _FORK, str(folder), str(steps), str(images), quantizer]
    paths = [str(ROOT), str(ROOT / "packages" / "verify"), str(ROOT / "tests")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _fork(folder: Path, steps: int, processes: int, **settings: Any) -> None:
    """Does the work of `start` and `finish` in forks of this process."""
    folder.mkdir()
    given = {key: str(value) for key, value in settings.items()}
    port, children = str(_free_port()), list[int]()
    for number in range(processes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks of a process with threads
            child = os.fork()
        if child == 0:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if processes > 1:
                os.environ |= {"WORLD_SIZE": str(processes), "NODE_RANK": "0", "LOCAL_RANK": str(number)}
                # Its import does this in a new process.
                rank_zero_only.rank = number  # type: ignore[attr-defined]
            _end_with(folder, steps, processes, given)
        children.append(child)
    deadline = time.monotonic() + 120
    for child in children:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 0


def _end_with(folder: Path, steps: int, processes: int, settings: dict[str, str]) -> None:
    """Runs `main` and ends this process."""
    status = 1
    try:
        main(folder, steps, processes, **settings)
        status = 0
    except BaseException:  # what the interpreter would print
        traceback.print_exc()
    finally:
        os._exit(status)


def finish(processes: list[subprocess.Popen[str]]) -> None:
    """Waits for the ranks and checks that all succeeded."""
    for process in processes:
        said = process.communicate(timeout=600)[0]
        assert process.returncode == 0, said


def states(folder: Path, processes: int) -> list[dict[str, torch.Tensor]]:
    """Returns the final state of each rank."""
    return [torch.load(folder / f"state.{rank}.pt", weights_only=True) for rank in range(processes)]


def images(folder: Path, processes: int, accumulate: int = 1) -> list[list[int]]:
    """Returns the sorted indices of each step's images over all ranks."""
    shares = [json.loads((folder / f"images.{rank}.json").read_text()) for rank in range(processes)]
    batches = [[*itertools.chain(*together)] for together in zip(*shares, strict=True)]
    steps = range(0, len(batches), accumulate)
    return [sorted(itertools.chain(*batches[at : at + accumulate])) for at in steps]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(folder: Path, steps: int, processes: int, **settings: str) -> None:
    """Runs one rank.

    Args:
        folder: folder of the checkpoint and of the written files.
        steps: length of the training.
        processes: number of ranks.
        settings: batch, accumulate, batch_norm, optimizer, compile and quantizer; `dies` is the step before
            which the process exits as if killed, with a checkpoint of that step; `of` is the rank that does so
            (default: all).
    """
    torch.set_num_threads(1)
    rank, dies = int(os.environ.get("LOCAL_RANK", "0")), int(settings.get("dies", -1))
    mortal = settings.get("of", str(rank)) == str(rank)
    config = _config(folder, steps, processes, settings)
    data = data_of(config)
    indices = data.calibration_indices(1437)
    pixels = [one for batch, _ in data.image_batches(indices, 256) for one in batch]
    known = {one.numpy().tobytes(): index for one, index in zip(pixels, indices, strict=True)}
    seen: list[list[int]] = []

    class Watched(QATModule):
        """Records which images each batch contains, identified by their pixels."""

        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            if self.global_step == dies and mortal:
                (folder / f"images.{rank}.json").write_text(json.dumps(seen))
                os._exit(3)
            seen.append([known[one.numpy().tobytes()] for one in batch[0]])

    lightning.seed_everything(config.seed, verbose=False)
    module = qat_module(config, Net(), data.inputs, Watched)
    module.calibrate(images for images, _ in data.calibration_batches(64, 32))
    fit(module, data, folder / "last.ckpt", config.trainer, Stage("ranks", 4, steps))
    torch.save(module.state_dict(), folder / f"state.{rank}.pt")
    (folder / f"images.{rank}.json").write_text(json.dumps(seen))


def _config(folder: Path, steps: int, processes: int, settings: dict[str, str]) -> Config:
    config = tiny(folder)
    config.data = DataConfig(
        image_size=8, batch_size=int(settings.get("batch", 32)), workers=0, augment="none"
    )
    config.quantizer = QUANTIZERS[settings.get("quantizer", "fake_quantize")]
    config.schedule = ScheduleConfig(
        epochs=4,
        max_steps=steps,
        lr=5e-3,
        optimizer=settings.get("optimizer", "sgd"),
        batch_norm=settings.get("batch_norm", "train"),
        freeze_batch_norm=0.9,
        freeze_observers=0.8,
    )
    dies = int(settings.get("dies", -1))
    config.trainer = TrainerConfig(
        accelerator="cpu",
        devices=processes,
        accumulate=int(settings.get("accumulate", 1)),
        compile=settings.get("compile") == "true",
        checkpoint_every=dies if dies > 0 else 1000,
        progress=False,
    )
    return config


if __name__ == "__main__" and sys.argv[1] == _FORK:
    for count in (1, 2):
        share, both = int(sys.argv[4]) // count, Path(sys.argv[2])
        _fork(both / str(count), int(sys.argv[3]), count, batch=share, quantizer=sys.argv[5])
elif __name__ == "__main__":
    given, wanted, several, *typed = sys.argv[1:]
    main(Path(given), int(wanted), int(several), **dict(one.split("=") for one in typed))
