"""Tests of search spaces, metrics and constraints, and that proposed values give the config of typed overrides."""

from __future__ import annotations

import math
from typing import Any

import pytest
from command_line import CONF

from qatkit.config.compose import compose_config
from qatkit.config.search_space import Numbers, Options, axes, differences, flat, override
from qatkit.records.objectives import check_objectives, constraints, figures, of_test_images
from qatkit_verify.errors import ConfigError

# Metrics on the test images and, under "validation", on the held-out images that decide between trials.
REPORT = {
    "accuracy": {"int8": {"top1": 91.0}, "float": {"top1": 99.0}},
    "latency": {"int8": {"median_ms": 0.5, "ratio": 2.0}},
    "fidelity": {"int8": {"agreement": 0.5, "sqnr_db": None}},
    "sizes": {"int8": 3_500_000, "float": 14_000_000},
    "measured": {
        "validation": {
            "accuracy": {"int8": {"top1": 97.5}, "float": {"top1": 98.25}},
            "fidelity": {"int8": {"agreement": 0.99, "sqnr_db": 31.5}},
        }
    },
}


def test_axes_are_read_in_the_order_of_their_keys() -> None:
    space = {"schedule.lr": {"low": 1e-4, "high": 1, "log": True}, "calibration": ["minmax", "mse"],
             "schedule.epochs": {"low": 1, "high": 9, "step": 2}}  # fmt: skip
    options, epochs, rate = axes(space)
    assert options == Options("calibration", ("minmax", "mse"))
    assert epochs == Numbers("schedule.epochs", 1, 9, 2) and epochs.whole
    assert rate == Numbers("schedule.lr", 1e-4, 1, None, True) and not rate.whole


def test_a_key_may_be_typed_with_its_dots() -> None:
    """Hydra reads dots as nested mappings. A typed part overrides only that part of the YAML file's entry."""

    def space(*typed: str) -> dict[str, Any]:
        return compose_config(CONF, ["recipe=quickstart", *typed]).search.space

    known = space("search=qat")
    rate = known["schedule.lr"]
    assert space("search=qat", "search.space.schedule.lr.high=1") == {
        **known,
        "schedule.lr": {**rate, "high": 1},
    }
    given = space("search=qat", "search.space.schedule.lr=[0.1,0.2]", "search.space.calibration=[mse]")
    assert given == {**known, "schedule.lr": [0.1, 0.2], "calibration": ["mse"]}
    nested = {"schedule": {"lr": {"low": 1e-4, "high": 1e-2}, "optimizer": ["sgd", "adamw"]}}
    whole = {"schedule.lr": nested["schedule"]["lr"], "schedule.optimizer": ["sgd", "adamw"]}
    assert flat(nested) == flat(flat(nested)) == whole
    with pytest.raises(ConfigError, match=r"^search\.space\.schedule\.lr\.hihg=2: "):
        space("search=qat", "search.space.schedule.lr.hihg=2")


@pytest.mark.parametrize(("key", "whole"), [
    ("schedule.lr", False), ("schedule.ema", False), ("calibration.percentile", False), ("schedule.epochs", True),
    ("schedule.max_steps", True),
])  # fmt: skip
def test_whether_numbers_are_whole_is_the_keys_to_say(key: str, whole: bool) -> None:
    for low, step in ((0, None), (0.0, None), (0, 1), (0, 1.0)):
        (axis,) = axes({key: {"low": low, "high": 1, "step": step}})
        assert isinstance(axis, Numbers) and axis.whole == whole
        assert {type(end) for end in axis.tried} == {int if whole else float}


def test_a_logarithmic_axis_is_divided_by_ratios() -> None:
    (axis,) = axes({"schedule.lr": {"low": 1e-4, "high": 1e-2, "log": True}})
    last = axis.count - 1
    found = [axis.at(index) for index in (0, last // 4, last // 2, last)]
    assert found == pytest.approx([1e-4, 10**-3.5, 1e-3, 1e-2], rel=1e-9)
    assert (found[0], found[-1]) == (1e-4, 1e-2)


def test_number_types_of_an_undeclared_key_follow_the_bounds() -> None:
    found = axes({f"model.kwargs.{high}": {"low": 0, "high": high} for high in (1, 1.0)})
    assert [isinstance(one, Numbers) and one.whole for one in found] == [True, False]


def test_an_algorithms_settings_say_it_too() -> None:
    hints = {"algorithm.mine.strength": float | None, "algorithm.mine.steps": int}
    found = axes({key: {"low": 1, "high": 2} for key in hints}, lambda key: hints[key])
    assert [isinstance(one, Numbers) and one.whole for one in found] == [True, False]


@pytest.mark.parametrize(
    ("space", "key"),
    [
        ({}, "search.space"),
        ({"schedule.epochs": {"low": 1.5, "high": 4}}, "search.space.schedule.epochs.low"),
        ({"schedule.epochs": {"low": 1, "high": 4, "step": 0.5}}, "search.space.schedule.epochs.step"),
        ({"verify.audit": {"low": 0, "high": 1}}, "search.space.verify.audit"),
        ({"calibration": {"low": 0, "high": 1}}, "search.space.calibration"),
        ({"schedule.lr": 3}, "search.space.schedule.lr"),
        ({"schedule.lr": []}, "search.space.schedule.lr"),
        ({"schedule.lr": [1, 1]}, "search.space.schedule.lr"),
        *(
            ({"mine": twice}, "search.space.mine")  # both values mean the same once they are typed
            for twice in (
                [1, 1.0],
                ["a", "b", "a"],
                [1, True],
                ["1e-3", 0.001],
                [None, "null"],
                [True, "true"],
            )
        ),
        ({"schedule.lr": [1e-3, float("nan")]}, "search.space.schedule.lr"),
        ({"data.mean": [[0.5], [0.4]]}, "search.space.data.mean"),
        ({"schedule.lr": {"low": 1}}, "search.space.schedule.lr.high"),
        ({"schedule.lr": {"low": 2, "high": 1}}, "search.space.schedule.lr.high"),
        ({"schedule.lr": {"low": 0, "high": 1, "log": True}}, "search.space.schedule.lr.low"),
        ({"schedule.lr": {"low": 1, "high": float("inf")}}, "search.space.schedule.lr.high"),
        ({"schedule.lr": {"low": True, "high": 2}}, "search.space.schedule.lr.low"),
        ({"schedule.lr": {"low": 1, "high": 2, "step": 3}}, "search.space.schedule.lr.step"),
        (
            {"schedule.lr": {"low": 0.25, "high": 1.0, "step": 0.3}},
            "search.space.schedule.lr.high",
        ),
        ({"schedule.lr": {"low": 1, "high": 2, "log": "yes"}}, "search.space.schedule.lr.log"),
        ({"schedule.lr": {"low": 1, "high": 2, "base": 10}}, "search.space.schedule.lr.base"),
        ({"search.trials": [1, 2]}, "search.space.search.trials"),
        ({"output_dir": ["a", "b"]}, "search.space.output_dir"),
        ({"+a": [1, 2]}, "search.space.+a"),
        *(
            ({key: [1, 2]}, f"search.space.{key}")  # these keys select the images that trials are compared on
            for key in ("seed", "verify.held_out", "verify.validation", "data.train_images")
        ),
    ],
)
def test_a_space_that_is_none_is_refused_by_its_key(space: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        axes(space)
    assert caught.value.key == key


def test_proposed_values_compose_as_typed_ones() -> None:
    proposed: dict[str, Any] = {"schedule.lr": 1.5e-05, "calibration": "mse", "schedule.max_steps": None,
                "verify.audit": False, "schedule.epochs": 3}  # fmt: skip
    config = compose_config(CONF, [override(key, value) for key, value in proposed.items()])
    assert (config.schedule.lr, config.schedule.max_steps, config.schedule.epochs) == (1.5e-05, None, 3)
    assert config.calibration.observer.endswith("MSEObserver") and config.verify.audit is False


def test_figures_are_in_the_units_that_are_shown() -> None:
    assert figures(REPORT) == {
        "accuracy": 97.5, "drop": 0.75, "agreement": 0.99, "sqnr": 31.5, "latency": 0.5, "speedup": 2.0, "size": 3.5,
    }  # fmt: skip
    assert of_test_images(REPORT) == {"accuracy": 91.0, "drop": 8.0, "agreement": 0.5, "sqnr": math.inf}
    assert figures({"accuracy": {}, "latency": {}, "sizes": {}}) == {}


def test_what_only_the_test_images_say_chooses_nothing() -> None:
    without = {key: value for key, value in REPORT.items() if key != "measured"}
    assert set(figures(without)) == {"latency", "speedup", "size"}
    assert of_test_images(without) == of_test_images(REPORT)


@pytest.mark.parametrize(
    ("text", "excess"), [("size<=3.5", 0.0), ("size <= 3", 0.5), ("accuracy>=98", 0.5), ("speedup>=1", -1.0)]
)
def test_a_bound_says_by_how_much_it_is_missed(text: str, excess: float) -> None:
    (bound,) = constraints([text])
    assert bound.excess(figures(REPORT)) == pytest.approx(excess)


@pytest.mark.parametrize("text", ["size<3", "size<=", "siz<=3", "size<=nan", "size<=inf", "<=3", "size<=3MB"])
def test_a_bound_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"search\.constraints"):
        constraints([text])


@pytest.mark.parametrize("names", [[], ["accuracy", "accuracy"], ["acuracy"]])
def test_objectives_are_known_and_each_once(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"search\.objectives"):
        check_objectives(names)


def test_what_differs_is_named() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "b": 2}) == ""
    assert differences({"a": 1, "b": 2}, {"a": 3, "c": 4}) == (
        "a is 1 there, 3 here; b is 2 there, absent here; c is absent there, 4 here"
    )
