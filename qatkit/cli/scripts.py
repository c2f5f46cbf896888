"""The two commands, qatkit-train and qatkit-export; train.py and export.py of a checkout call the same.

conf/ and recipes/ stand beside the package in a checkout and inside of it in a wheel.
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


def train() -> int:
    """A float model to a verified INT8 file: the exit status."""
    return _started(_train)


def export() -> int:
    """A checkpoint to its file again, or a float ONNX file to a quantized one: the exit status."""
    return _started(_export, from_checkpoint=True)


def conf() -> Path:
    """The folder with config.yaml and the groups."""
    installed = _PACKAGE / "conf"
    return installed if installed.is_dir() else _PACKAGE.parent / "conf"


def _started(job: Callable[[Config], int], *, from_checkpoint: bool = False) -> int:
    """What the command line came to; Ctrl-C while it is still imported, which takes a second, ends in a line, too."""
    gc.disable()  # until the command line has been checked: what is imported stays, and looking through it takes time
    try:
        from qatkit.cli.command_line import main

        return main(job, conf(), from_checkpoint=from_checkpoint)
    except KeyboardInterrupt:  # from when the imports are done, `main` answers it
        print("interrupted before anything began", file=sys.stderr)
        return 130


def _train(config: Config) -> int:
    """The whole chain; 1 when the file falls short of a bound in `config.verify`."""
    from qatkit_verify.errors import ConfigError
    from qatkit_verify.placement.sites import VARIANTS

    if config.placement == VARIANTS:
        raise ConfigError(
            "placement", VARIANTS, "fixed, measured or a file; export.py (qatkit-export) writes variants"
        )
    # They import torch: after the configuration has been checked.
    from qatkit.jobs import pipeline, rescue

    return rescue.climb(config) if config.rescue.climb else pipeline.train(config)


def _export(config: Config) -> int:
    """1 when the audit of a checkpoint's file finds a problem, or an ONNX file's falls short."""
    from qatkit_verify.placement.sites import VARIANTS

    if config.onnx is not None:
        from qatkit.jobs import quantize_file

        return quantize_file.quantize(config)
    # They import torch: after the configuration has been checked.
    from qatkit.jobs import export_checkpoint, variants

    return variants.variants(config) if config.placement == VARIANTS else export_checkpoint.export(config)
