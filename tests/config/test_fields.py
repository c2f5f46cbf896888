"""Tests of the documentation and limits of settings; the schema and library code enforce the same limits."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from qatkit.config.field_types import checked, settings_of
from qatkit.config.fields import (
    PLACE,
    Choices,
    Limit,
    Range,
    check_limits,
    limit_of,
    setting,
)
from qatkit.config.schema import (
    MODES,
    BackendConfig,
    CalibrationConfig,
    Config,
    DataConfig,
    ExportConfig,
    OverrideConfig,
    ScheduleConfig,
)
from qatkit.data import Preprocessing
from qatkit.export import ort_modes
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.fuse import fuse
from qatkit.quant.formats.table import FORMATS
from qatkit.quant.granularity import BLOCK_SIZES, GRANULARITIES
from qatkit.quant.observers import Distribution, Percentile
from qatkit.quant.spec import ACTIVATIONS
from qatkit_verify.errors import ConfigError, as_typed


@dataclass
class Inner:
    """A group of settings."""

    share: float = setting(0.5, "of all", Range(0, 1))


@dataclass
class Outer:
    """Settings of every kind."""

    count: int | None = setting(None, "of things", Range(1))
    word: str = setting("a", "one", Choices(("a", "b")))
    flag: bool = setting(False, "on")
    many: dict[str, Any] = setting(dict, "by name")
    inner: Inner = dataclasses.field(default_factory=Inner)


@pytest.mark.parametrize(
    ("limit", "text", "expected", "inside", "outside"),
    [
        (
            Range(1),
            "1 or higher",
            "a number of at least 1",
            [1, 1e9, 2**31 - 1],
            [0, 2**31, 1e30, float("inf"), float("nan")],
        ),
        (Range(0, 1), "0 to 1", "a number from 0 to 1", [0, 0.5, 1], [-1e-9, 1.1]),
        (Range(0, above=True), "above 0", "a number above 0", [1e-9], [0, -1]),
        (
            Range(50, 100, above=True),
            "above 50, up to 100",
            "a number above 50, up to 100",
            [50.1, 100],
            [50, 100.1],
        ),
        (
            Range(1, all_of_them=True, whole=True),
            "1 or higher, or -1 for all",
            "an integer of at least 1, or -1 for all",
            [1, -1],
            [0, -2],
        ),
        (Choices(("a", "b")), "a | b", "one of a, b", ["a", "b"], ["", "ab"]),
    ],
)
def test_a_limit_holds_what_it_says(
    limit: Limit, text: str, expected: str, inside: list[Any], outside: list[Any]
) -> None:
    assert str(limit) == text
    for value in inside:
        limit.check("key", value)
    for value in outside:
        with pytest.raises(
            ConfigError,
            match=rf"^key={re.escape(str(value))}: expected {re.escape(expected)}(; the maximum is | \(|$)",
        ):
            limit.check("key", value)


def test_a_place_is_what_a_file_system_and_a_yaml_file_can_hold() -> None:
    for path in ("a/b", "~/ä b", "x" * 240, "/", "d/" * 1000):
        PLACE.check("key", path)
    for path in ("", " ", "a\0b", "a\nb", "a\x1b[31m", "x" * 241, "é" * 121, "\udcff", "d/" * 2500):
        with pytest.raises(ConfigError, match=r"^key=.*: expected a path without control characters"):
            PLACE.check("key", path)


def test_a_word_that_is_nearly_one_of_them_is_offered() -> None:
    with pytest.raises(ConfigError, match=r"^key=sgdd: expected one of sgd, adamw \(did you mean sgd\?\)$"):
        Choices(("sgd", "adamw")).check("key", "sgdd")
    with pytest.raises(ConfigError, match=r"^key=x: expected one of sgd, adamw$"):
        Choices(("sgd", "adamw")).check("key", "x")


def test_a_field_tells_everything_about_itself() -> None:
    told = [dataclasses.astuple(one) for one in settings_of(Outer)]
    assert told == [
        ("count", "int | None", "null", "1 or higher", "of things"),
        ("word", "str", "a", "a | b", "one"),
        ("flag", "bool", "false", "", "on"),
        ("many", "dict[str, Any]", "{}", "", "by name"),
    ]
    assert limit_of(Outer, "count") == Range(1)
    assert limit_of(Outer, "word") == Choices(("a", "b"))
    for name in ("flag", "nothing"):
        with pytest.raises(KeyError, match=name):
            limit_of(Outer, name)


def test_groups_are_checked_to_the_bottom() -> None:
    check_limits(Outer(), "outer")
    for value, line in (
        (Outer(count=0), "outer.count=0: expected an integer of at least 1, or null"),
        (Outer(inner=Inner(share=2)), "outer.inner.share=2: expected a number from 0 to 1"),
        (Outer(many={"x": Inner(share=-1)}), "outer.many.x.share=-1: expected a number from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=f"^{line}$"):
            check_limits(value, "outer")
    with pytest.raises(ConfigError, match=r"^count=0"):
        check_limits(Outer(count=0), "")


@dataclass(frozen=True)
class OfAUser:
    """A user's algorithm with a class variable and an annotation that cannot be evaluated."""

    stage: ClassVar[str] = "calibrated"
    share: float | None = setting(None, "of things", Range(0, 1))
    other: NowhereImported | None = None  # type: ignore[name-defined]  # noqa: F821


def test_a_users_annotations_need_not_be_evaluated() -> None:
    check_limits(OfAUser(share=0.5), "algorithm.own")
    with pytest.raises(
        ConfigError, match=r"^algorithm\.own\.share=2: expected a number from 0 to 1, or null$"
    ):
        check_limits(OfAUser(share=2), "algorithm.own")


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("count", "three", "a value of type int | None"),
        ("count", True, "a value of type int | None"),
        ("count", 1.0, "a value of type int | None"),
        ("count", 0, "an integer of at least 1, or null"),
        ("word", None, "a value of type str"),
        ("flag", 1, "a value of type bool"),
        ("many", ["x"], "a value of type dict[str, Any]"),
    ],
)
def test_a_value_from_yaml_is_checked_by_type_and_limit(name: str, value: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"key={as_typed(value)}: expected {line}")):
        checked(Outer, name, "key", value)


def test_a_value_from_yaml_arrives_as_its_type() -> None:
    found = checked(Inner, "share", "key", 1)
    assert (found, type(found)) == (1.0, float)
    assert checked(Outer, "count", "key", None) is None
    assert checked(Outer, "many", "key", {"x": 1}) == {"x": 1}


def test_every_setting_of_the_schema_says_what_it_is() -> None:
    whole = Config()
    groups: list[Any] = [value for value in vars(whole).values() if dataclasses.is_dataclass(value)]
    assert len(groups) == 17
    for group in (whole, OverrideConfig(), *groups):
        for one in dataclasses.fields(group):
            assert one.metadata.get("doc") or getattr(group, one.name) in groups, one.name


def test_the_schema_takes_the_words_of_the_library() -> None:
    """The schema repeats the library's number types, granularities and export modes, so both must agree."""
    assert ACTIVATIONS == ("uint8", "int8", "uint4", "int16", "uint16")
    for owner in (OverrideConfig, BackendConfig):
        assert limit_of(owner, "activation_dtype") == Choices((*ACTIVATIONS, *FORMATS))
        assert limit_of(owner, "weight_dtype") == Choices(("int8", "int4", "int3", "int2", "int16", *FORMATS))
    for owner in (OverrideConfig, BackendConfig):
        limit = limit_of(owner, "weight_granularity")
        assert all(map(limit.holds, (*GRANULARITIES, *({"block": size} for size in BLOCK_SIZES))))
        assert not any(
            map(limit.holds, ("block", "per_moon", 32, {"block": 24}, {"blocks": 32}, {"block": "32"}))
        )
    assert all(callable(getattr(ort_modes, mode)) for mode in MODES.values)


def test_library_code_refuses_what_the_schema_refuses(tmp_path: Path) -> None:
    def line(owner: type, name: str, key: str, value: object) -> str:
        return re.escape(f"{key}={value}: expected {limit_of(owner, name).expected()}")

    with pytest.raises(ConfigError, match=line(ExportConfig, "opset", "export.opset", 24)):
        export_onnx(nn.Identity(), torch.zeros(2, 3), tmp_path / "x.onnx", opset=24)
    with pytest.raises(ConfigError, match=line(ScheduleConfig, "batch_norm", "schedule.batch_norm", "thaw")):
        fuse(nn.Identity(), torch.zeros(2, 3), "thaw")
    with pytest.raises(
        ConfigError, match=line(CalibrationConfig, "percentile", "calibration.percentile", 50)
    ):
        Percentile(50)
    with pytest.raises(ConfigError, match=line(CalibrationConfig, "deviations", "calibration.deviations", 0)):
        Distribution(0)
    with pytest.raises(ConfigError, match=line(DataConfig, "image_size", "data.image_size", 0)):
        Preprocessing(0, 1, (0.5,), (0.5,))


@pytest.mark.parametrize(
    "value", ["yes", "", 3, None, {}, {"input": {}}, {"input": 2}, {"input": {"2": "h"}}, {"input": {2: "a b"}},
              {"input": {-1: "w"}}, {"input": {2: "batch"}}, ["auto"]]
)  # fmt: skip
def test_dynamic_axes_are_a_word_or_names_by_axis(value: Any) -> None:
    limit = limit_of(ExportConfig, "dynamic_axes")
    for good in ("none", "auto", {"input": {2: "height", 3: "width"}}, {"ids": {1: "t"}, "mask": {1: "t"}}):
        limit.check("export.dynamic_axes", good)
    with pytest.raises(ConfigError, match="expected none, auto, or names by input and axis"):
        limit.check("export.dynamic_axes", value)
