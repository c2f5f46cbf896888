"""The commands qatkit, qatkit-train and qatkit-export; train.py and export.py of a checkout call the last two.

The folders conf/ and recipes/ are next to the package in a checkout and inside it in a wheel.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qatkit.config.schema import Config

_PACKAGE = Path(__file__).parents[1]
_USAGE = """qatkit: float models and ONNX files to verified INT8 files

  qatkit train [recipe=NAME] [key=value ...]     a model through the whole chain
  qatkit export checkpoint=FILE | onnx=FILE      a checkpoint again, or a float ONNX file
  qatkit compare FOLDER                          many runs in a table and a page
  qatkit doctor                                  what works on this machine
  qatkit --version

`qatkit train --help` lists every recipe, group and key."""


def train() -> int:
    """Turns a float model into a verified INT8 file; returns the exit status."""
    return _started(_train)


def export() -> int:
    """Exports a checkpoint again, or quantizes a float ONNX file; returns the exit status."""
    return _started(_export, from_checkpoint=True)


def main() -> int:
    """Runs `qatkit COMMAND ...` and returns its exit status."""
    commands = {"train": train, "export": export, "compare": _compare, "doctor": _doctor}
    asked = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if asked == "--version":
        from qatkit.cli.doctor import version

        print(f"qatkit {version()}")
        return 0
    if asked in commands:
        # The name of the single command, by which a distributed run starts its other processes.
        sys.argv = [str(Path(sys.argv[0]).with_name(f"qatkit-{asked}")), *sys.argv[2:]]
        return commands[asked]()
    print(_USAGE)
    if asked in ("--help", "-h"):
        return 0
    print(f"error: {asked}: expected one of {', '.join(commands)}", file=sys.stderr)
    return 2


def conf() -> Path:
    """Returns the folder with config.yaml and the groups."""
    installed = _PACKAGE / "conf"
    return installed if installed.is_dir() else _PACKAGE.parent / "conf"


def _started(job: Callable[[Config], int], *, from_checkpoint: bool = False) -> int:
    """Runs the command line and returns its exit status.

    Ctrl-C during the imports, which take a second, also ends in one line.
    """
    gc.disable()  # until the command line is checked: scanning imported objects takes time and frees nothing
    try:
        from qatkit.cli.command_line import main

        return main(job, conf(), from_checkpoint=from_checkpoint)
    except KeyboardInterrupt:  # after the imports, `main` handles it
        print("interrupted before the command started", file=sys.stderr)
        return 130


def _compare() -> int:
    from qatkit.compare.command import main as compare

    return compare()


def _doctor() -> int:
    from qatkit.cli.doctor import main as doctor

    return doctor()


def _train(config: Config) -> int:
    """Runs all stages and returns the exit status: 1 if the file misses a bound in `config.verify`."""
    from qatkit_verify.errors import ConfigError
    from qatkit_verify.placement.sites import VARIANTS

    if config.placement == VARIANTS:
        raise ConfigError(
            "placement",
            VARIANTS,
            "fixed, measured or a placement.json; export.py (qatkit-export) writes variants",
        )
    # They import torch, so only after the configuration has been checked.
    from qatkit.jobs import pipeline, rescue

    return rescue.climb(config) if config.rescue.climb else pipeline.train(config)


def _export(config: Config) -> int:
    """Exports and returns the exit status.

    It is 1 if the audit of a checkpoint's file finds a problem, or if the file made from an ONNX file misses a bound.
    """
    from qatkit_verify.placement.sites import VARIANTS

    if config.onnx is not None:
        from qatkit.jobs import quantize_file

        return quantize_file.quantize(config)
    # They import torch, so only after the configuration has been checked.
    from qatkit.jobs import export_checkpoint, variants

    return variants.variants(config) if config.placement == VARIANTS else export_checkpoint.export(config)
