"""Tests of a model.json that a user wrote: read, or refused in one line that names the key and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from float_files import by_hand, settings

from qatkit.jobs import quantize_file
from qatkit.records.preprocessing_file import preprocessing_beside
from qatkit_verify.errors import ConfigError, as_typed

RIGHT: dict[str, Any] = {
    "channels": 3,
    "image_size": 8,
    "resize": 8,
    "mean": [0.5, 0.4, 0.3],
    "std": [0.2, 1, 1e-3],
    "interpolation": "bilinear",
    "upright": True,
}
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
COUNT, NAN, INF = "an integer from 1 to 65536", float("nan"), float("inf")
SIDE = f"{COUNT}, or [height, width]"
# Key, expectation in the message, and wrong values that give this message.
VALUES: list[tuple[str, str, list[Any]]] = [
    ("mean", "a list of numbers from -1000000 to 1000000, one per channel", [
        [NAN] * 3, [INF, 0, 0], [1e300] * 3, [10**400] * 3, "0.5", 0.5, None, [], [[0.5]] * 3, ["0.5"] * 3, [True] * 3,
        {"0": 1}, DEEP, [None]]),
    ("std", "a list of positive numbers from 1e-06 to 1000000, one per channel", [
        [0.0] * 3, [-1] * 3, [NAN] * 3, [-INF] * 3, [1e-30] * 3, 1, [[1]], "x"]),
    ("std", "3 numbers, as in mean", [[0.5]]),
    ("image_size", SIDE, [0, -8, 8.0, True, "8", None, [8], [8, 8, 3], [8, 0], [8, "8"], 10**9, 10**30, INF, NAN, {}]),
    ("resize", SIDE, [0, 1e3, "large", DEEP]),
    ("resize", "at least image_size (8)", [7, [9, 7]]),
    ("interpolation", "one of nearest, bilinear, bicubic", ["lanczos", 2, None, ["bilinear"], {}]),
    ("upright", "true or false", ["yes", 1, None, []]),
    ("channels", "3, the number of values in mean", [1]),
    ("channels", COUNT, ["3", 3.0, None]),
    ("fit", "one of crop, resize, letterbox", ["fill", 1, None, ["crop"]]),
    ("pad_value", "a number from 0 to 255", [-1, 256, "114", None, True, NAN]),
    ("align", "one of center, top_left", ["left", {}]),
    ("channel_order", "one of RGB, BGR", ["bgr", "L", 3]),
    ("layout", "one of NCHW, NHWC", ["nchw", None]),
    ("pixels", "one of 0..1, 0..255", [255, [0, 255]]),
]  # fmt: skip
WRONG = [(key, value, expected) for key, expected, values in VALUES for value in values]


def refused(folder: Path, text: str) -> str:
    (folder / "model.json").write_text(text)
    with pytest.raises(ConfigError) as raised:
        preprocessing_beside(folder / "file.onnx")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000
    assert str(folder / "model.json") in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("key", "value", "expected"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_value_is_named(key: str, value: Any, expected: str, tmp_path: Path) -> None:
    said = refused(tmp_path, json.dumps({"preprocessing": RIGHT | {key: value}}))
    assert said.startswith(f"model.json: preprocessing.{key}={as_typed(value)[:40]}")
    assert f": expected {expected}; correct or move " in said


@pytest.mark.parametrize("key", ["image_size", "resize", "mean", "std", "interpolation"])
def test_a_missing_value_is_named(key: str, tmp_path: Path) -> None:
    said = refused(tmp_path, json.dumps({"preprocessing": {k: v for k, v in RIGHT.items() if k != key}}))
    assert said.startswith(f"model.json: preprocessing.{key}=(missing): expected ")


def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path) -> None:
    said = refused(tmp_path, json.dumps({"preprocessing": RIGHT | {"image_sizes": 8}}))
    assert said.startswith(
        "model.json: preprocessing.image_sizes=8: the key does not exist (did you mean image_size"
    )


@pytest.mark.parametrize(
    "text",
    ["no JSON", "", "{", '{"preprocessing": 1e', "[" * 100_000, "\x00", "9" * 5000],
    ids=lambda text: text[:9],
)
def test_what_is_no_json_is_said(text: str, tmp_path: Path) -> None:
    assert refused(tmp_path, text).startswith("model.json=") and "cannot be read as JSON (" in refused(
        tmp_path, text
    )


@pytest.mark.parametrize("text", ["[]", "null", "3", '"imagenet"'])
def test_json_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    assert "expected an object with preprocessing" in refused(tmp_path, text)


@pytest.mark.parametrize("value", ["imagenet", None, [], 1, DEEP], ids=lambda value: str(value)[:9])
def test_preprocessing_that_is_no_object_is_refused(value: Any, tmp_path: Path) -> None:
    assert "expected an object with image_size, resize" in refused(
        tmp_path, json.dumps({"preprocessing": value})
    )


def test_bytes_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        preprocessing_beside(tmp_path / "file.onnx")
    (tmp_path / "model.json").unlink()
    (tmp_path / "model.json").mkdir()
    with pytest.raises(ConfigError, match="not a plain file"):
        preprocessing_beside(tmp_path / "file.onnx")


def test_another_tools_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"format": "layers-model", "mean": "x"}')
    assert preprocessing_beside(tmp_path / "file.onnx") is None


@pytest.mark.parametrize("upright", [True, False, None])
def test_what_is_right_is_returned(upright: bool | None, tmp_path: Path) -> None:
    told = {key: value for key, value in RIGHT.items() if key not in ("upright", "channels")}
    told |= {} if upright is None else {"upright": upright}
    (tmp_path / "model.json").write_text(json.dumps({"preprocessing": told, "classes": 3}))
    assert preprocessing_beside(tmp_path / "file.onnx") == told


def test_what_other_inputs_need_is_returned(tmp_path: Path) -> None:
    told = RIGHT | {"image_size": [48, 192], "resize": [48, 192], "fit": "letterbox", "pad_value": 127.5,
                    "align": "top_left", "channel_order": "BGR", "layout": "NHWC", "pixels": "0..255"}  # fmt: skip
    (tmp_path / "model.json").write_text(json.dumps({"preprocessing": told}))
    assert preprocessing_beside(tmp_path / "file.onnx") == told
    grey = told | {"mean": [0.5], "std": [0.5], "channels": 1}
    assert "expected RGB, unless mean has 3 numbers" in refused(tmp_path, json.dumps({"preprocessing": grey}))


def test_the_job_refuses_before_anything_is_written(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "file.onnx")
    (tmp_path / "model.json").write_text(json.dumps({"preprocessing": RIGHT | {"mean": [float("inf")] * 3}}))
    with pytest.raises(
        ConfigError, match=r"^model\.json: preprocessing\.mean=\[inf, inf, inf\]: expected a list"
    ):
        quantize_file.quantize(settings(path, "weight_only", tmp_path / "run"))
    assert not (tmp_path / "run").exists()


SIDES = {
    "report.json": ["[]", "null", "{", '{"files": 3}', '{"files": [3, {"name": "file.onnx", "sha256": []}]}',
                    '{"files": {"name": "file.onnx"}}', '{"files": [{"name": []}]}', "[" * 100_000],
    "run/config.yaml": ["[]", "a: [", "a: &a [*a]", "\x00", "onnx: {}", "mode: [1]\nonnx: 3", "- " * 5000],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in SIDES for text in SIDES[name]], ids=lambda value: value[:20]
)
def test_other_files_beside_it_raise_nothing_else(name: str, text: str, tmp_path: Path) -> None:
    """Checks that a damaged report or configuration leads to nothing worse than a ConfigError of one line."""
    path = by_hand(tmp_path / "file.onnx")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.float.onnx").write_bytes(b"")
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as raised:
        quantize_file.quantize(settings(path, "weight_only", tmp_path / "run"))
    assert "\n" not in str(raised.value)
