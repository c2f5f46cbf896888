"""The two commands, qatkit-train and qatkit-export; train.py and export.py of a checkout call the same.

conf/ and recipes/ stand beside the package in a checkout and inside of it in a wheel.
"""

from __future__ import annotations

from pathlib import Path

from qatkit.config.command_line import main
from qatkit.config.schema import Config
from qatkit_verify.errors import ConfigError
from qatkit_verify.placement.sites import VARIANTS

_PACKAGE = Path(__file__).parent


def train() -> int:
    """A float model to a verified INT8 file: the exit status."""
    return main(_train, conf())


def export() -> int:
    """A checkpoint to its file again, or a float ONNX file to a quantized one: the exit status."""
    return main(_export, conf(), from_checkpoint=True)


def conf() -> Path:
    """The folder with config.yaml and the groups."""
    installed = _PACKAGE / "conf"
    return installed if installed.is_dir() else _PACKAGE.parent / "conf"


def _train(config: Config) -> int:
    """The whole chain; 1 when the file falls short of a bound in `config.verify`."""
    from qatkit.run import pipeline, rescue  # they import torch: after the configuration has been checked

    if config.placement == VARIANTS:
        raise ConfigError(
            "placement", VARIANTS, "fixed, measured or a file; export.py (qatkit-export) writes variants"
        )
    return rescue.climb(config) if config.rescue.climb else pipeline.train(config)


def _export(config: Config) -> int:
    """1 when the audit of a checkpoint's file finds a problem, or an ONNX file's falls short."""
    from qatkit.run import (  # import torch: after the configuration has been checked
        export_checkpoint,
        quantize_file,
        variants,
    )

    if config.placement == VARIANTS:
        return variants.variants(config)
    return export_checkpoint.export(config) if config.onnx is None else quantize_file.quantize(config)
