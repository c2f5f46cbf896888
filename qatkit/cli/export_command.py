"""Composes the configuration of export.py for the checkpoint of a run, or for a float ONNX file.

A checkpoint is exported with the config.yaml next to it, with which it was trained. A float ONNX file is
quantized with the defaults, without a model, schedule or recipe. Therefore only a few keys can be set; others
are reported as mistakes. Only placement=variants uses the configuration that train.py would compose.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from qatkit.config.compose import load_config, schema
from qatkit.config.fields import limit_of
from qatkit.config.schema import FILE_MODES, UNLABELLED_BOUNDS, Config, DataConfig
from qatkit.config.schema.files import CLEAN, ENCODINGS, SUMMARY
from qatkit.config.schema.model import DRAWN
from qatkit.records.preprocessing_file import preprocessing_beside
from qatkit.records.run_files import CONFIG_FILE
from qatkit_verify.errors import ConfigError
from qatkit_verify.placement.sites import VARIANTS

EXPORT_KEYS = ("checkpoint", "output_dir", "export.opset", "export.dynamic_batch", "export.dynamic_axes", "export.io",
               "export.packed_weights", "export.bundle", "export.bundle_as", "export.bundle_float",
               "export.golden_images", "export.sign", "export.demo", "export.demo_runtime", "export.encrypt",
               "export.encrypt_bundle", "data", "calibration.cache", "verify.threads", "verify.audit",
               "verify.latency_batch", "trainer.debug")  # fmt: skip
ONNX_GROUPS = ("data", "backend", "calibration", "export", "verify", "trainer", "clean", "encodings")
ONNX_KEYS = ("onnx", "mode", "weights", "name", "seed", "task", "output_dir", "model.kwargs", "data", "backend",
             "verify", "calibration.images", "calibration.batch_size", "export.opset", "export.encrypt",
             "trainer.progress", "trainer.debug", "clean")  # fmt: skip
# Keys for modes that do not quantize.
FILE_KEYS = {
    CLEAN: ("onnx", "mode", "name", "output_dir", "clean", "export.encrypt", "verify.threads", "trainer.debug"),
    SUMMARY: ("onnx", "mode", "name", "output_dir", "verify.threads", "clean.custom_ops", "clean.inputs",
              "trainer.debug"),
    ENCODINGS: ("onnx", "mode", "name", "output_dir", "encodings", "export.encrypt", "trainer.debug"),
}  # fmt: skip
# Keys for mode=static, whose stages are those of train.py.
STATIC_GROUPS = (*ONNX_GROUPS, "quantizer", "algorithm", "precision", "target", "analysis")
STATIC_KEYS = (*ONNX_KEYS, "quantizer", "calibration", "algorithm", "algorithm_choice", "precision", "placement",
               "target", "export", "analysis")  # fmt: skip
# Keys for mode=weight_only weights.bits=N, which has the same stages and a fixed backend.
PACKED_KEYS = (
    *(key for key in STATIC_KEYS if key not in ("backend", "placement")),
    "backend.overrides",
    "weights",
)
# Keys that say where the data of a run are now and how they are read, but not what is read.
_PLACES = ("data.root", "data.tokenizer", "data.download", "data.workers")
_DRAWN = 64  # samples of `data=drawn`
_GPTQ = {"gptq": {"target": "qatkit.algorithms.GPTQ"}}
_STATIC_BATCH = 8  # as in the recipes of ONNX files, since a few dozen samples suffice for calibration
# Entries of a model.json on images whose key in the data group has another name, or does not exist.
_KEYS, _NOT_KEYS = {"channel_order": "channels"}, ("channels", "interpolation", "upright")
# Share of equal decisions below which ONNX Runtime's optimizer must have changed the model.
_BROKEN = 0.9


def export_run(node: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Returns the configuration of export.py for a run's checkpoint, a float ONNX file or `placement=variants`.

    Raises:
        ConfigError: a key cannot be set for this export, or the checkpoint or its config.yaml does not exist.
    """
    for key in ("checkpoint", "onnx"):
        if node[key] is not None:
            limit_of(Config, key).check(key, node[key])
            node[key] = os.path.expanduser(node[key])
    if node.placement == VARIANTS:
        return _of_variants(node)
    if node.onnx is None:
        if node.mode is not None:
            raise ConfigError(
                "mode", node.mode, "null without onnx=FILE, since a checkpoint is always exported as QDQ"
            )
        return _saved_run(node, overrides)
    if node.checkpoint is not None:
        raise ConfigError(
            "onnx", node.onnx, f"null with checkpoint={node.checkpoint} (set only one of the two)"
        )
    return _onnx_run(node, overrides)


def _of_variants(node: DictConfig) -> DictConfig:
    """Returns the configuration that train.py would compose, for the files of `placement=variants`.

    Raises:
        ConfigError: checkpoint or onnx is set, although the model comes from model.name or a recipe.
    """
    for key in ("checkpoint", "onnx"):
        if node[key] is not None:
            raise ConfigError(
                key, node[key], f"null with placement={VARIANTS}; the model comes from model.name or a recipe"
            )
    return node


def _onnx_run(node: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Returns the defaults with the settings of the command line, without the recipe, a model or a schedule.

    Operators that stay float in a given file, and differences in the last digits of a float residual stream,
    are only reported: unless the command line sets these bounds or the group `verify`, `verify.audit` is off
    and `verify.min_agreement` is low. Keys of `data` that a bundle next to the file describes are null unless
    they are typed.
    """
    if node.mode is None:
        raise ConfigError("mode", None, f"one of {', '.join(FILE_MODES.values)} with onnx=FILE")
    packed = node.mode == "weight_only" and node.weights.bits is not None
    graph = packed or node.mode == "static"
    keys, groups = (STATIC_KEYS, STATIC_GROUPS) if graph else (ONNX_KEYS, ONNX_GROUPS)
    typed = _typed(node.mode, overrides, PACKED_KEYS if packed else FILE_KEYS.get(node.mode, keys))
    config = schema()
    config.name = Path(node.onnx).stem or "onnx"
    for group in groups:
        config[group] = node[group]
    for key in typed.intersection(("onnx", "mode", "name", "seed", "task", "output_dir")):
        config[key] = node[key]
    for key in ("algorithm_choice", "placement") if graph else ():
        config[key] = node[key]
    config.weights = node.weights
    config.model.kwargs = node.model.kwargs
    # A data group describes its own images; a bundle knows the input of its file.
    told = {} if node.mode in FILE_KEYS else preprocessing_beside(Path(node.onnx)) or {}
    presets: dict[str, Any] = {
        f"data.{_KEYS.get(name, name)}": None for name in told if name not in _NOT_KEYS
    }
    if graph:
        presets["calibration.batch_size"] = _STATIC_BATCH
    if "verify" not in typed:
        presets |= {"verify.audit": False, "verify.min_agreement": _BROKEN}
    for key in presets.keys() - typed:
        OmegaConf.update(config, key, presets[key])
    if packed:
        _set_data_and_algorithm(config, typed)
    return config


def _typed(mode: str, overrides: Sequence[str], allowed: Sequence[str]) -> set[str]:
    """Returns the keys that the command line sets.

    Raises:
        ConfigError: a key is not among `allowed`.
    """
    typed = set()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_hydra_override():
            continue
        key = override.key_or_group
        if not _within(key, allowed):
            value = override.get_value_element_as_str()
            reason = f"the key cannot be set with onnx=FILE mode={mode}; the keys that can are {', '.join(allowed)}"
            raise ConfigError(key, value, reason=reason)
        typed.add(key)
    return typed


def _set_data_and_algorithm(config: DictConfig, typed: set[str]) -> None:
    """Sets what the command line leaves open for packed weights.

    Without data, calibration uses `data.count` (or a default number of) random samples, and there are no
    bounds on the agreement with float. With data, the algorithm is GPTQ.
    """
    if "data" not in typed:
        drawn = DataConfig(source=DRAWN, batch_size=32, eval_batch_size=50, workers=0, download=False)
        given = {
            key.removeprefix("data."): OmegaConf.select(config, key)
            for key in typed
            if key.startswith("data.")
        }
        config.data = OmegaConf.structured(dataclasses.replace(drawn, **given))
    drawn_samples = config.data.source == DRAWN
    if not drawn_samples and not any(_within(key, ("algorithm", "algorithm_choice")) for key in typed):
        config.algorithm = _GPTQ
    for bound in UNLABELLED_BOUNDS if drawn_samples and "verify" not in typed else ():
        if f"verify.{bound}" not in typed:
            config.verify[bound] = None
    if drawn_samples and "calibration.images" not in typed:
        config.calibration.images = config.data.count or _DRAWN


def _within(key: str, allowed: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in allowed)


def _saved_run(node: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Returns the configuration next to the checkpoint, with the settings of the command line.

    `node` is the complete composition; only its keys in `overrides` are used. The run's bundle and publication
    are made again only if the command line requests them.
    """
    allowed = "a checkpoint written by train.py, with its config.yaml next to it (or onnx=FILE mode=MODE)"
    if node.checkpoint is None or not Path(node.checkpoint).is_file():
        raise ConfigError("checkpoint", node.checkpoint, allowed)
    saved_file = Path(node.checkpoint).with_name(CONFIG_FILE)
    if not saved_file.is_file():
        raise ConfigError("checkpoint", node.checkpoint, f"{allowed}; {saved_file} is missing")
    saved_config = load_config(saved_file)  # deliverables are written again only if typed
    export = saved_config.export.kept()
    config = dataclasses.replace(saved_config, output_dir=None, resume=None, export=export)
    saved, of_data = OmegaConf.structured(config), dict[str, str]()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if override.is_hydra_override():
            continue
        if not _within(key, EXPORT_KEYS):
            raise ConfigError(key, override.get_value_element_as_str(), reason=_export_keys_text())
        OmegaConf.update(saved, key, OmegaConf.select(node, key), force_add=True)
        if _within(key, ("data",)):
            of_data[key] = override.get_value_element_as_str()
    _check_data_keys(of_data, saved)
    assert isinstance(saved, DictConfig)
    return saved


def _check_data_keys(typed: Mapping[str, str], saved: Any) -> None:
    """Rejects keys of the data that the export does not read, or that would make a bundle differ from its run."""
    if saved.export.io == "uint8":
        return
    allowed = _PLACES if saved.export.bundle else ()
    for key, value in typed.items():
        if key not in allowed:
            places = (
                f"; with export.bundle=true, so can {', '.join(_PLACES)}" if key in _PLACES or allowed else ""
            )
            reason = "the key can only be set with export.io=uint8, where images determine the range of the outputs"
            raise ConfigError(key, value, reason=reason + places)


def _export_keys_text() -> str:
    return (
        f"the key cannot be set when a checkpoint is exported; the keys that can are {', '.join(EXPORT_KEYS)}"
    )


def export_notes() -> list[str]:
    """Returns the notes of `--help` on export.py, since not all keys apply to it."""
    return [
        "checkpoint=FOLDER/last.ckpt exports the checkpoint of a train.py run again; keys that can be set: "
        + ", ".join(EXPORT_KEYS),
        "onnx=FILE mode=MODE quantizes a float ONNX file; keys that can be set: "
        + ", ".join(ONNX_KEYS)
        + "; with mode=static, which runs the stages of train.py, also: "
        + ", ".join(key for key in STATIC_KEYS if key not in ONNX_KEYS),
        "onnx=FILE mode=clean writes the file with fixed shapes, folded constants and the like; keys: "
        + ", ".join(FILE_KEYS[CLEAN])
        + "; onnx=FILE mode=summary prints a table of its operators; keys: "
        + ", ".join(FILE_KEYS[SUMMARY])
        + "; onnx=FILE mode=encodings writes the scales and zero points of a quantized file as JSON; keys: "
        + ", ".join(FILE_KEYS[ENCODINGS]),
        "placement=variants writes files of a model or recipe, given as for train.py, for qatkit-measure on another "
        "machine.",
    ]
