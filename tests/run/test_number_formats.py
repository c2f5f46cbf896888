"""Tests of backend=simulated, with number formats such as mxfp4: which settings it allows and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from qatkit.config.schema import BackendConfig, Config, ExportConfig, OverrideConfig
from qatkit.jobs.packed_weights import check_form
from qatkit.quant.formats.table import FORMATS
from qatkit.run.backend import backend_of
from qatkit_verify.errors import ConfigError

SIMULATED = "qatkit.quant.backends.SIMULATED"


def config(**backend: Any) -> Config:
    return Config(backend=BackendConfig(target=SIMULATED, **backend))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_named_for_weights_and_activations(name: str) -> None:
    backend = backend_of(config(weight_dtype=name, activation_dtype=name))
    assert (backend.weight.dtype, backend.activation.dtype) == (name, name)
    assert backend.simulated and not backend.weights_alone and not backend.saturates


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            BackendConfig(weight_dtype="mxfp4"),
            "backend.weight_dtype=mxfp4: expected an integer type (only backend=simul",
        ),
        (BackendConfig(activation_dtype="bfp16"), "backend.activation_dtype=bfp16: expected an integer type"),
        (
            BackendConfig(overrides={"fc": OverrideConfig(weight_dtype="nvfp4")}),
            "backend.overrides.fc.weight_dtype=nvfp4: expected an integer type",
        ),
        (
            BackendConfig(target=SIMULATED, weight_dtype="int8"),
            "backend.weight_dtype=int8: expected one of float16",
        ),
        (
            BackendConfig(target=SIMULATED, weight_granularity="per_tensor"),
            "backend.weight_granularity=per_tensor: expected null with backend=simulated, whose number formats are no",
        ),
        (
            BackendConfig(target=SIMULATED, every_operator=True),
            "backend.every_operator=true: expected false with",
        ),
    ],
)
def test_formats_and_integers_are_kept_apart(asked: BackendConfig, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        backend_of(Config(backend=asked))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("dtype", "opset", "message"),
    [
        ("mxint8", 20, "export.opset=20: expected 21 or higher with export.packed_weights=dequantize_linear"),
        ("float8_e5m2", 18, "export.opset=18: expected 19 or higher with export.packed_weights=dequantize"),
        ("mxfp4", 23, "export.packed_weights=dequantize_linear: expected matmul_nbits with weights of mxfp4"),
        ("mxfp8_e4m3", 21, ""),
        ("bfloat16", 13, ""),
    ],
)
def test_tensors_of_a_format_need_its_opset(dtype: str, opset: int, message: str) -> None:
    asked = config(weight_dtype=dtype)
    asked.export = ExportConfig(opset=opset, packed_weights="dequantize_linear")
    if not message:
        check_form(asked)
        return
    with pytest.raises(ConfigError) as refused:
        check_form(asked)
    assert str(refused.value).startswith(message)


def test_what_counts_integers_is_refused() -> None:
    asked = config()
    asked.algorithm = {"adaround": {"target": "qatkit.algorithms.AdaRound"}}
    with pytest.raises(ConfigError, match="algorithm=adaround: expected equalize, smooth_quant, bias_corr"):
        backend_of(asked)
    asked.algorithm = {"gptq": {"target": "qatkit.algorithms.GPTQ"}}
    assert backend_of(asked).simulated
    asked = config()
    asked.calibration.observer = "qatkit.quant.observers.MSEObserver"
    with pytest.raises(ConfigError, match="other observers need integers"):
        backend_of(asked)
    asked = config()
    asked.export.io = "uint8"
    with pytest.raises(ConfigError, match=r"export\.io=uint8: expected float32 with backend=simulated"):
        backend_of(asked)
