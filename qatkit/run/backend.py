"""The backend of a run, as its configuration changes it. Without torch."""

from __future__ import annotations

from dataclasses import replace

from qatkit.config.schema import Config
from qatkit.quant.backends import Backend
from qatkit.quant.granularity import granularity_of
from qatkit.quant.spec import FEW_BITS
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError


def backend_of(config: Config) -> Backend:
    """The backend that `config.backend` names, changed as the group asks.

    Raises:
        ConfigError: `backend.target` is no Backend, or `export.pack_int4` has no weights to pack.
    """
    backend = resolve(config.backend.target, "backend.target")
    if not isinstance(backend, Backend):
        raise ConfigError(
            "backend.target", config.backend.target, "the dotted path of a qatkit.quant.backends.Backend"
        )
    for name in ("asks_for_int8", "broken_pairs") if backend.other_runtime else ():
        resolve(f"{backend.other_runtime}.{name}", "backend.target (other_runtime)")
    if config.backend.weight_granularity is not None:
        granularity = granularity_of(config.backend.weight_granularity)
        backend = replace(backend, weight=replace(backend.weight, granularity=granularity))
    if config.backend.every_operator:
        backend = backend.everywhere()
    dtypes = {backend.weight.dtype, *(one.weight_dtype for one in config.backend.overrides.values())}
    if config.export.pack_int4 and dtypes.isdisjoint(FEW_BITS):
        kinds = ", ".join(FEW_BITS)
        allowed = f"false without an operator of weights of {kinds} (backend.overrides.PATTERN.weight_dtype)"
        raise ConfigError("export.pack_int4", True, allowed)
    return backend.reduced(config.backend.reduce_range)
