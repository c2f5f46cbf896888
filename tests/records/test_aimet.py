"""Tests of AIMET's encodings, with files that AIMET itself wrote."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
from aimet_samples import SAMPLES
from onnx import numpy_helper

from qatkit.records import aimet
from qatkit.records.encodings import Encoding, Encodings, encodings_from


def content(name: str) -> dict[str, Any]:
    return dict(json.loads((SAMPLES / name).read_text()))


def read(name: str) -> Encodings:
    return encodings_from(SAMPLES / name, "calibration.encodings")


def entry(content: dict[str, Any], name: str) -> Any:
    for group in ("encodings", "activation_encodings", "param_encodings"):
        listed = content.get(group, {})
        pairs = listed.items() if isinstance(listed, dict) else ((one["name"], one) for one in listed)
        for known, one in pairs:
            if known == name:
                return one
    raise AssertionError(name)


@pytest.mark.parametrize("version", aimet.VERSIONS)
def test_every_version_gives_the_pairs_of_aimets_file(version: str) -> None:
    """Compares scales and zero points with the QDQ file that AIMET made from the same encodings."""
    graph = onnx.load(SAMPLES / "per_channel.qdq.onnx").graph
    held = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            held[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    found = read(f"per_channel.{version}.json").all
    wanted = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    for node in wanted:
        name = {"output_updated": "output"}.get(node.input[0], node.input[0])
        if name == "flat" and version != "2.0.0":
            continue  # listed by 2.0.0 only, since its values are another tensor's, reshaped
        scale, zero = held[node.input[1]], held[node.input[2]]
        assert (
            found[name].scale.tobytes() == scale.astype(np.float32).reshape(found[name].scale.shape).tobytes()
        )
        assert (found[name].zero_point == zero.reshape(found[name].scale.shape)).all()
        assert found[name].dtype == str(zero.dtype)
    assert len(wanted) == 9


@pytest.mark.parametrize("version", aimet.VERSIONS)
def test_written_entries_are_aimets_own(version: str) -> None:
    """Checks that the numbers of an entry are those that AIMET wrote, rounded to float32."""
    given = content(f"per_channel.{version}.json")
    written = aimet.as_dict(read(f"per_channel.{version}.json"), version)
    for name in read(f"per_channel.{version}.json").all:
        mine, theirs = entry(written, name), entry(given, name)
        for one, other in zip(_rows(mine), _rows(theirs), strict=True):
            assert one.keys() == other.keys()
            for key, value in other.items():
                if key in ("scale", "min", "max", "y_scale"):
                    np.testing.assert_allclose(one[key], value, rtol=1e-6, atol=1e-12)
                else:
                    assert one[key] == value


def _rows(entry: Any) -> list[dict[str, Any]]:
    return entry if isinstance(entry, list) else [entry]


def test_blocks_are_read_in_the_order_of_channels() -> None:
    old, new = (read(f"blocks.{version}.json").all["fc.weight"] for version in ("1.0.0", "2.0.0"))
    assert (old.dtype, old.block_size, new.dtype, new.block_size, new.axis) == ("int4", 16, "int4", 16, 1)
    assert new.scale.shape == (10, 2)
    assert old.scale.tobytes() == new.scale.tobytes()
    assert not old.zero_point.any()


def test_biases_are_in_the_last_version_alone() -> None:
    assert {name for name in read("per_channel.2.0.0.json").parameters if "bias" in name} == {
        "first.bias",
        "fc.bias",
    }
    found = read("per_channel.2.0.0.json")
    assert aimet.left_out(found, "1.0.0") == ["first.bias", "fc.bias"]
    assert aimet.left_out(found, "2.0.0") == []


@pytest.mark.parametrize("version", aimet.VERSIONS)
@pytest.mark.parametrize(
    ("dtype", "zero"), [("uint8", 3), ("int8", -5), ("int16", 0), ("uint16", 40000), ("int4", 0)]
)
def test_a_type_comes_back_with_its_zero_point(version: str, dtype: str, zero: int) -> None:
    scale = np.float32(0.1) / np.float32(3)
    given = Encoding(dtype, np.asarray(scale, np.float32), np.asarray(zero, np.int64))
    back = aimet.from_dict(json.loads(json.dumps(aimet.as_dict(Encodings({"x:0": given}), version))))
    assert back.activations["x:0"].equals(given)
    if version == "1.0.0":  # AIMET's convention: an offset of the unsigned type
        (offset,) = aimet.as_dict(Encodings({"x": given}), version)["activation_encodings"][0]["offset"]
        assert offset == {"uint8": -3, "int8": -123, "int16": -32768, "uint16": -40000, "int4": -8}[dtype]


def test_entries_of_floats_are_noted() -> None:
    given = {
        "version": "1.0.0",
        "param_encodings": [],
        "activation_encodings": [{"name": "x", "bw": 16, "dtype": "FLOAT", "enc_type": "PER_TENSOR"}],
    }
    found = aimet.from_dict(given)
    assert (found.all, found.notes) == ({}, ("skipped the encodings that are not of integers: x",))
