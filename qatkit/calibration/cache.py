"""Keeps calibration statistics in a file, so that a second run with the same model and data needs no forward pass.

A safetensors file stores the state of every observer (its range, its histogram) by the site of its tensor. Its
metadata contains a key: fingerprints of everything that the statistics depend on. A file for another model, other data
or another method is neither used nor overwritten; the error names the parts that differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from qatkit.calibration.limits import set_limits
from qatkit.encryption.vault import readable, secret
from qatkit.graph.quantizers import fake_quantizers, is_quantizer
from qatkit.graph.scales.align import align
from qatkit.quant.spec import QuantSpec
from qatkit_verify.errors import ConfigError

Key = Mapping[str, str]
_KEY, _ABOUT, _DIGEST = "key", "about", "digest"
_STATE = frozenset({"training", "observing", "enabled"})


def fingerprint(*parts: Any) -> str:
    """Returns a fingerprint of the bytes of tensors and the JSON of other values, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict) and any(isinstance(one, Tensor) for one in part.values()):
            digest.update(fingerprint(*(value for item in part.items() for value in item)).encode())
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def of_model(graph_module: fx.GraphModule) -> str:
    """Returns the fingerprint of a prepared graph: its operators, parameters and buffers, without the ranges."""
    quantizers = tuple(f"{node.target}." for node in graph_module.graph.nodes if is_quantizer(node))
    state = {k: v for k, v in graph_module.state_dict().items() if not k.startswith(quantizers)}
    settings = {name: _settings(module) for name, module in graph_module.named_modules() if name}
    return fingerprint(
        graph_module.code, settings, *(part for item in sorted(state.items()) for part in item)
    )


def _settings(module: nn.Module) -> dict[str, str]:
    """Returns the type and plain attributes of a module (strides, bounds, specs), except those that a run changes."""
    plain = {
        name: str(value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | tuple | list | QuantSpec | None)
        and not name.startswith("_")
        and name not in _STATE
    }
    return {"": f"{type(module).__module__}.{type(module).__qualname__}"} | plain


def save(path: Path, graph_module: fx.GraphModule, key: Key, about: Mapping[str, Any]) -> None:
    """Writes the statistics atomically.

    Args:
        path: the path of the file.
        graph_module: the calibrated graph.
        key: the fingerprints of everything that the statistics depend on.
        about: further facts to store, as JSON values.

    Raises:
        ConfigError: the file cannot be written.
    """
    tensors = {
        f"{name}.{part}": value.contiguous().cpu()
        for name, quantizer in fake_quantizers(graph_module).items()
        if quantizer.observer is not None
        for part, value in quantizer.observer.state_dict().items()
    }
    stored = {_KEY: json.dumps(dict(key)), _ABOUT: json.dumps(dict(about))}
    stored[_DIGEST] = _digest(tensors, stored)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with secret(path) as temporary:
            save_file(tensors, temporary, stored)
    except OSError as error:
        raise ConfigError(
            "calibration.cache", path, f"a file that can be written ({error.strerror})"
        ) from error


def restore(path: Path, graph_module: fx.GraphModule, key: Key) -> dict[str, Any]:
    """Gives the graph the stored statistics and the ranges that follow from them; returns the stored `about`.

    Raises:
        ConfigError: the file is damaged, or its key differs from `key`.
    """
    about, tensors = check(path, key)
    for name, quantizer in fake_quantizers(graph_module).items():
        if quantizer.observer is not None:
            own = {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}
            quantizer.observer.load_state_dict(own)
    set_limits(graph_module)
    align(graph_module)
    return about


def check(path: Path, key: Key) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the stored `about` and the tensors of a file.

    Args:
        path: the path of the file.
        key: the parts of the key that must be equal to those in the file.

    Raises:
        ConfigError: the file is damaged, or its key differs from `key`.
    """
    stored, about, tensors = _read(path)
    differing = [part for part in key if stored.get(part) != key[part]]
    if differing:
        shown = ", ".join(f"{part} is {stored.get(part, 'missing')}, not {key[part]}" for part in differing)
        reason = (
            f"the file is from another model, data or settings ({shown}); name another file, or delete it"
        )
        raise ConfigError("calibration.cache", path, reason=reason)
    return about, tensors


def _read(path: Path) -> tuple[dict[str, str], dict[str, Any], dict[str, Tensor]]:
    try:
        with readable(path) as plain, safe_open(plain, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  `file` is not a mapping
        if metadata[_DIGEST] != _digest(tensors, metadata):
            raise ValueError("its contents have changed since it was written")
        return dict(json.loads(metadata[_KEY])), json.loads(metadata[_ABOUT]), tensors
    except ConfigError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        told = f"the file is damaged or was not written by qatkit ({reason}); delete it to calibrate again"
        raise ConfigError("calibration.cache", path, reason=told) from error


def _digest(tensors: Mapping[str, Tensor], stored: Mapping[str, str]) -> str:
    parts = (part for item in sorted(tensors.items()) for part in item)
    return fingerprint(*parts, stored[_KEY], stored[_ABOUT])


def table(graph_module: fx.GraphModule) -> dict[str, dict[str, float | int | str]]:
    """Returns the range, scale, zero_point and type of every tensor by its site, as plain values."""
    return {site: quantizer.range_record() for site, quantizer in fake_quantizers(graph_module).items()}
