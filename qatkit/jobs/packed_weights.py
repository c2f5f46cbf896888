"""Checks, before the long stages, that packed weights suit the operators of the model."""

from __future__ import annotations

from typing import Any

from qatkit.config.schema import Config
from qatkit.graph.quantizers import quantized_weights
from qatkit.models.onnx_files import PREFIX
from qatkit.quant.formats.table import DEQUANTIZED, UNSCALED
from qatkit.quant.granularity import BLOCK_SIZES, PerBlock
from qatkit.quant.recurrent_layers import QATRecurrent
from qatkit.run.backend import backend_of
from qatkit.run.export import DEQUANTIZE
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError
from qatkit_verify.session import ACCURACY_LEVEL


def check_packed(module: QATModule, config: Config) -> None:
    """Checks, for a weight-only backend, that there are weights to quantize, and a row at least as long as a block.

    A row shorter than a block has one scale, as with per-channel scales. If all rows are shorter, blocks have
    no effect.

    Raises:
        ConfigError: the model has no such weights, or the blocks have no effect.
    """
    if not module.backend.weights_alone:
        return
    found = quantized_weights(module.graph)
    if not found:
        name = config.model.name
        key, value = ("onnx", name.removeprefix(PREFIX)) if name.startswith(PREFIX) else ("model.name", name)
        reason = (
            "the model has no weight to quantize: no Conv, Linear, embedding or "
            "recurrent layer with a constant weight"
        )
        raise ConfigError(key, value, reason=f"{reason} that may be quantized")
    rows = [
        (_width(operator), path, fake.spec.granularity)
        for path, operator, fake in found
        if not isinstance(operator, QATRecurrent)  # such weights always have one scale per row
    ]
    sizes = [one.size for _, _, one in rows if isinstance(one, PerBlock)]
    if not rows or len(sizes) < len(rows) or any(width >= min(sizes) for width, _, _ in rows):
        return
    width, path, _ = max(rows, key=lambda row: row[0])
    raise _too_long(config, min(sizes), width, path)


def check_form(config: Config) -> None:
    """Checks that the form of packed weights and the accuracy level of their products suit mode and backend.

    Raises:
        ConfigError: `export.packed_weights` or `export.accuracy_level` is not supported, or they exclude each other.
    """
    asked = config.export
    for key, value, default in (
        ("export.accuracy_level", asked.accuracy_level, "0"),
        ("export.packed_weights", asked.packed_weights, "matmul_nbits"),
    ):
        if value == default:
            continue
        if asked.mode != "static":
            raise ConfigError(
                key, value, f"{default} with export.mode={asked.mode}, whose weights are not packed"
            )
        backend = backend_of(config)
        if backend.simulated and key == "export.packed_weights":
            _check_dequantized(config, backend.weight.dtype)
        elif not backend.weights_alone:
            name = backend.name
            allowed = f"{default} with backend={name}, whose weights are not packed (backend=weight_only packs them)"
            raise ConfigError(key, value, allowed)
    if asked.packed_weights == DEQUANTIZE and asked.accuracy_level != "0":
        allowed = f"0 with export.packed_weights={DEQUANTIZE}, where the session sets the level"
        raise ConfigError("export.accuracy_level", asked.accuracy_level, f"{allowed} ({ACCURACY_LEVEL})")


def _check_dequantized(config: Config, dtype: str) -> None:
    """Rejects number formats of weights that ONNX Runtime's DequantizeLinear does not support in this opset."""
    asked = config.export
    overrides = config.backend.overrides.values()
    for name in (dtype, *(one.weight_dtype for one in overrides if one.weight_dtype is not None)):
        if name in UNSCALED:  # written as a Cast, which every opset supports
            continue
        if name not in DEQUANTIZED:
            known = ", ".join((*UNSCALED, *DEQUANTIZED))
            allowed = (
                f"matmul_nbits with weights of {name}, since ONNX Runtime's "
                f"DequantizeLinear only supports {known}"
            )
            raise ConfigError("export.packed_weights", asked.packed_weights, allowed)
        if asked.opset < DEQUANTIZED[name]:
            allowed = (
                f"{DEQUANTIZED[name]} or higher with export.packed_weights={DEQUANTIZE} and weights of {name}"
            )
            raise ConfigError("export.opset", asked.opset, allowed)


def _width(operator: Any) -> int:
    """Returns the number of inputs per output channel."""
    return int(operator.weight[0].numel())


def _too_long(config: Config, size: int, width: int, path: str) -> ConfigError:
    fitting = [one for one in BLOCK_SIZES if one <= width]
    widest = f"the widest weight, '{path}', has {width} inputs per output channel"
    if config.weights.bits is not None:
        allowed = f"at most {fitting[-1]}, or per_channel" if fitting else "per_channel"
        return ConfigError("weights.block", size, f"{allowed}; {widest}")
    allowed = f"at most {{block: {fitting[-1]}}}, or per_channel" if fitting else "per_channel"
    return ConfigError("backend.weight_granularity", f"{{block: {size}}}", f"{allowed}; {widest}")
