"""Tests of encodings as JSON: read back exactly, and refused if damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qatkit.records.encodings import Encoding, Encodings, encodings_from
from qatkit_verify.errors import ConfigError

KEY = "calibration.encodings"


def test_every_scale_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Covers all exponents of float32, including subnormal numbers, with random mantissas."""
    bits = np.random.default_rng(0).integers(1, 0x7F800000, 20000, np.uint32)
    scales = bits.view(np.float32)
    given = Encodings({}, {"w": Encoding("int8", scales, np.zeros(len(scales), np.int64), axis=0)})
    path = tmp_path / "e.json"
    path.write_text(json.dumps(given.as_dict("file.onnx")))
    back = encodings_from(path, KEY).parameters["w"]
    assert np.array_equal(back.scale.view(np.uint32), bits)


@pytest.mark.parametrize(
    ("dtype", "zero", "ends"),
    [
        ("uint8", 128, (-64, 63.5)),
        ("int8", 0, (-64, 63.5)),
        ("uint4", 0, (0, 7.5)),
        ("int16", 0, (-16384, 16383.5)),
        ("float8e4m3fn", 0, (-224, 224)),
    ],
)
def test_the_range_follows_from_scale_and_type(dtype: str, zero: int, ends: tuple[float, float]) -> None:
    one = Encoding(dtype, np.asarray(0.5, np.float32), np.asarray(zero, np.int64)).as_dict()
    assert (one["rmin"], one["rmax"]) == ends


def test_a_file_comes_back_whole(tmp_path: Path) -> None:
    blocks = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    given = Encodings(
        {
            "features/relu:0": Encoding(
                "uint16", np.asarray(1e-3, np.float32), np.asarray(7, np.int64), node="q"
            )
        },
        {"a.b/w": Encoding("int4", blocks, np.ones((2, 3), np.int64), 1, 16)},
        {"y": "mxint8"},
    )
    path = tmp_path / "e.json"
    path.write_text(json.dumps(given.as_dict("file.onnx")))
    back = encodings_from(path, KEY)
    assert back.formats == given.formats
    for name, one in given.all.items():
        assert back.all[name].equals(one)
        assert (back.all[name].axis, back.all[name].block_size) == (one.axis, one.block_size)
    assert back.activations["features/relu:0"].node == "q"


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"dtype": "uint8", "scale": 0}, "'x': expected scales above 0"),
        ({"dtype": "uint8", "scale": 1e-60}, "'x': expected scales above 0"),
        ({"dtype": "uint8", "scale": 1, "zero_point": 256}, "zero points that are integers of uint8"),
        ({"dtype": "uint8", "scale": 1, "zero_point": 0.5}, "zero points that are integers of uint8"),
        ({"dtype": "int8", "scale": [1, 2], "zero_point": [0, 0, 0]}, "as many zero points as scales"),
        ({"dtype": "byte", "scale": 1}, "unknown type byte"),
        ({"scale": 1}, "KeyError: 'dtype'"),
        ([], "AttributeError"),
    ],
)
def test_a_damaged_entry_is_refused(entry: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps({"format": "qatkit.encodings", "version": 1, "activations": {"x": entry}}))
    with pytest.raises(ConfigError, match=r"an entry is damaged") as caught:
        encodings_from(path, KEY)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
def test_a_file_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"expected a JSON file of mode=encodings or of AIMET"):
        encodings_from(path, KEY)
