"""Tests of a rescue's rungs, each a configuration: what each adds, and where the user's settings apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qatkit.config.rules import validate
from qatkit.config.schema import BackendConfig, CalibrationConfig, Config, OverrideConfig, ScheduleConfig
from qatkit.jobs.rungs import RUNGS, RungInputs, handed_over, naive, with_choices_of

BY_NAME = {rung.name: rung for rung in RUNGS}
SMOOTH = {"target": "qatkit.algorithms.SmoothQuant", "images": 16}


def asked(normalizes: bool = True, **changes: Any) -> RungInputs:
    return RungInputs(Config(**changes), normalizes)


def climbed(given: RungInputs, *names: str) -> dict[str, Config]:
    """Returns the config of each rung, as if each rung before it and the algorithms `names` had been kept."""
    kept, found = given.config, {}
    for rung in RUNGS:
        found[rung.name] = rung.change(given, kept)
        validate(found[rung.name])
        front = {"points": [{"floats": [], "chosen": True}]}
        report = {"algorithms": [{"name": name, "kept": True} for name in names], "precision": front}
        kept = with_choices_of(found[rung.name], report)
    return found


def test_the_naive_run_quantizes_every_operator_per_tensor() -> None:
    config = naive(Config(backend=BackendConfig(overrides={"fc": OverrideConfig(float=True)})), "model.onnx")
    validate(config)
    assert (config.onnx, config.mode) == ("model.onnx", "static")
    assert config.backend.every_operator and config.backend.weight_granularity == "per_tensor"
    assert config.backend.overrides == {}  # they name modules, which a file does not have


def test_each_of_the_first_rungs_changes_one_thing() -> None:
    found = climbed(asked())
    whole, channel, ranges, places = (
        found[name] for name in ("whole_operators", "per_channel", "calibration", "placement")
    )
    assert replace(whole, backend=channel.backend) == channel
    assert (whole.backend.weight_granularity, channel.backend.weight_granularity) == ("per_tensor", None)
    assert replace(channel, calibration=ranges.calibration) == ranges
    assert ranges.calibration.search == "tournament" and channel.calibration.search == "none"
    assert replace(ranges, backend=places.backend) == places
    assert ranges.backend.every_operator and not places.backend.every_operator


def test_the_backend_of_the_user_is_what_the_rungs_end_at() -> None:
    own = BackendConfig(
        "qatkit.quant.backends.QNNPACK", reduce_range=True, overrides={"fc": OverrideConfig(float=True)}
    )
    found = climbed(asked(backend=own))
    assert found["placement"].backend == own == found["qat"].backend
    assert found["whole_operators"].backend.target == own.target
    assert found["whole_operators"].backend.overrides == own.overrides  # an override to float always applies


def test_only_the_last_rung_trains_and_unmeasured_bounds_are_off() -> None:
    found = climbed(asked(schedule=ScheduleConfig(epochs=3, float_epochs=2)))
    assert {name for name, config in found.items() if config.schedule.epochs} == {"qat"}
    assert all(config.schedule.float_epochs == 0 for config in found.values())
    assert all(config.verify.min_agreement is None and not config.verify.audit for config in found.values())
    assert not any(config.rescue.climb for config in found.values())


@pytest.mark.parametrize(("normalizes", "optimizer"), [(True, "adamw"), (False, "sgd")])
def test_fine_tuning_without_a_schedule_of_the_users_own(normalizes: bool, optimizer: str) -> None:
    schedule = climbed(asked(normalizes, schedule=ScheduleConfig(epochs=0)))["qat"].schedule
    assert (schedule.optimizer, schedule.epochs, schedule.distill) == (optimizer, 1, 1.0)


def test_fine_tuning_by_the_users_own_schedule() -> None:
    own = ScheduleConfig(epochs=4, optimizer="adamw", lr=3e-4, distill=0.5)
    assert climbed(asked(schedule=own))["qat"].schedule == own


def test_divided_channels_are_not_trained_by_sgd() -> None:
    for normalizes, kept in ((True, ["smooth_quant"]), (False, [])):
        found = climbed(asked(normalizes, schedule=ScheduleConfig(epochs=0)), "smooth_quant")
        assert list(found["qat"].algorithm) == kept


def test_the_users_algorithm_settings_are_kept_and_compete() -> None:
    own = {"smooth_quant": SMOOTH, "mine": {"target": "my.Own"}}
    found = climbed(asked(algorithm=own), "smooth_quant")
    assert found["smooth_quant"].algorithm == {"smooth_quant": SMOOTH}
    competing = found["corrections"]
    assert competing.algorithm_choice == "auto"
    assert competing.algorithm["smooth_quant"] == SMOOTH and "mine" in competing.algorithm
    assert list(found["block_reconstruction"].algorithm) == ["smooth_quant", "block_reconstruction"]


def test_what_a_competition_has_chosen_is_written_down() -> None:
    offered = BY_NAME["corrections"].change(asked(), Config())
    rows = [{"name": name, "kept": name == "bias_correction"} for name in offered.algorithm]
    config = with_choices_of(offered, {"algorithms": rows})
    assert (list(config.algorithm), config.algorithm_choice) == (["bias_correction"], "all")


def test_operators_that_a_front_has_left_float_stay_so() -> None:
    own = BackendConfig(overrides={"fc": OverrideConfig(weight_dtype="int4")})
    searched = BY_NAME["mixed_precision"].change(asked(backend=own), Config(backend=own))
    assert searched.precision.search == "auto"
    points = [
        {"floats": [], "chosen": False},
        {"floats": ["a.0", "b"], "chosen": True},
        {"floats": None, "chosen": False},
    ]
    config = with_choices_of(searched, {"precision": {"points": points}})
    assert config.precision.search == "none"
    assert config.backend.overrides == own.overrides | {
        name: OverrideConfig(float=True) for name in ("a.0", "b")
    }


def test_a_cache_of_ranges_is_of_another_model() -> None:
    found = climbed(asked(calibration=CalibrationConfig(cache="ranges.safetensors", images=96)))
    assert all(config.calibration.cache is None for config in found.values())
    assert all(config.calibration.images == 96 for config in found.values())


def test_the_handed_over_file_is_verified_as_the_user_asked() -> None:
    given = Config()
    given.verify.max_drop = 0.3
    config = handed_over(given, climbed(RungInputs(given, True))["placement"])
    assert config.verify.max_drop == 0.3 and config.verify.audit
    assert config.verify.checks == given.verify.checks
