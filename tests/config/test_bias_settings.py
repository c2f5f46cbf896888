"""Checks that bias and scale types are refused where the backend or another setting does not support them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qatkit.config.rules import validate
from qatkit.config.schema import BackendConfig, Config, OverrideConfig
from qatkit.jobs.checks import check_job
from qatkit.run.backend import backend_of
from qatkit.run.quantizers import quantizers_of
from qatkit_verify.errors import ConfigError

BACKENDS = "qatkit.quant.backends."


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            BackendConfig(target=f"{BACKENDS}TENSORRT", bias_dtype="int16"),
            (
                "backend.bias_dtype=int16: expected null or float with "
                f"{BACKENDS}TENSORRT, which only supports float biases"
            ),
        ),
        (
            BackendConfig(
                target=f"{BACKENDS}WEIGHT_ONLY", overrides={"fc": OverrideConfig(bias_dtype="int32")}
            ),
            "backend.overrides.fc.bias_dtype=int32: expected null or float with "
            f"{BACKENDS}WEIGHT_ONLY, which only supports float biases",
        ),
        (
            BackendConfig(target=f"{BACKENDS}SIMULATED", bias_dtype="int8"),
            "backend.bias_dtype=int8: expected null with backend=simulated, whose number formats are not integers",
        ),
        (
            BackendConfig(
                target=f"{BACKENDS}SIMULATED", overrides={"fc": OverrideConfig(scale_type="int16")}
            ),
            "backend.overrides.fc.scale_type=int16: expected null with backend=simulated, "
            "whose number formats are not integers",
        ),
        (
            BackendConfig(
                target=f"{BACKENDS}WEIGHT_ONLY",
                weight_scale_dtype="uint8",
                overrides={"fc": OverrideConfig(scale_type="float16")},
            ),
            "backend.overrides.fc.scale_type=float16: expected null or float with backend.weight_scale_dtype=uint8",
        ),
    ],
)
def test_what_a_backend_has_not_is_refused(backend: BackendConfig, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        backend_of(replace(Config(), backend=backend))
    assert str(refused.value) == message


def test_float_biases_are_what_other_runtimes_take() -> None:
    given = backend_of(
        replace(Config(), backend=BackendConfig(target=f"{BACKENDS}TENSORRT", bias_dtype="float"))
    )
    assert given.weight.bias_dtype == "float"


@pytest.mark.parametrize("key", ["placement", "precision.search"])
def test_narrow_biases_are_not_chosen_by_the_clock(key: str) -> None:
    config = replace(Config(), backend=BackendConfig(bias_dtype="int8"))
    if key == "placement":
        config.placement = "measured"
    else:
        config.precision.search = "auto"
    with pytest.raises(ConfigError, match=rf"^{key}=\w+: expected \w+ with backend.bias_dtype=int8$"):
        validate(config)


def test_a_rescue_with_narrow_biases_is_refused() -> None:
    config = replace(Config(), backend=BackendConfig(bias_dtype="int16"))
    config.rescue.climb = True
    with pytest.raises(
        ConfigError, match=r"^rescue.climb=true: expected false with backend.bias_dtype=int16, "
    ):
        check_job(config, False)


def test_learned_scales_in_an_override_of_powers_are_refused() -> None:
    config = replace(Config(), backend=BackendConfig(overrides={"fc": OverrideConfig(scale_type="pow2")}))
    config.quantizer.weight = "qatkit.quant.learned.lsq.LSQWeightFakeQuantize"
    with pytest.raises(ConfigError, match=r"a class that supports backend.overrides.fc.scale_type=pow2$"):
        quantizers_of(config)
