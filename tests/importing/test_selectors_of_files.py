"""Tests of selectors on ONNX files with odd names: what each matches and its effect on the written file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_names import Read, feeds, matched, quantized
from written import same

FLOAT = {"float": True}
J1, J2 = '{"a":1}', '{"a":2}'
COLONS = ["net/conv:0", "net/left:0", "net/right:0", "net/add:0", "head/fc:0"]
# File, selector, the names it matches, and the operators that become float.
BY_NAME = [
    ("colons", "net/left:0", ["net/left:0"], {"net/left:0", "net/add:0"}),
    ("colons", "net/*:0", ["net/conv:0", "net/relu:0", *COLONS[1:4]], set(COLONS[:4])),
    ("colons", "re/.*(left|right):0", COLONS[1:3], set(COLONS[1:4])),
    ("colons", "op/Conv", COLONS[:3], set(COLONS[:4])),
    ("colons", "op/conv", COLONS[:3], set(COLONS[:4])),
    ("colons", "op/Gemm", ["head/fc:0"], {"head/fc:0"}),
    ("colons", "op/linear", ["head/fc:0"], {"head/fc:0"}),
    ("colons", "op/Add", ["net/add:0"], {"net/add:0"}),
    ("json", J1, [J1], {J1}),
    ("json", "block[0]", ["block[0]"], {"block[0]"}),
    ("json", "block[[]?]", ["block[0]", "block[1]"], {"block[0]", "block[1]"}),
    ("json", "block*", ["block[0]", "block[1]", "block0"], {"block[0]", "block[1]", "block0"}),
    ("json", r're/\{"a":\d\}', [J1, J2], {J1, J2}),
    ("json", r"re/block\d", ["block0"], {"block0"}),
    ("dots", "layer.1.conv", ["layer.1.conv"], {"layer.1.conv"}),
    ("dots", "layer.?.conv", ["layer.0.conv", "layer.1.conv"], {"layer.0.conv", "layer.1.conv"}),
    ("dots", r"re/layer\.1\d?\.conv", ["layer.1.conv", "layer.10.conv"], {"layer.1.conv", "layer.10.conv"}),
    ("dots", "größe der 面", ["größe der 面"], {"größe der 面"}),
    ("dots", "*面", ["größe der 面"], {"größe der 面"}),
    ("prefixes", "op/conv", ["op/conv"], {"op/conv"}),
    ("prefixes", "re/a.*", ["re/a.*"], {"re/a.*"}),
    ("prefixes", "a*", ["a*"], {"a*"}),
    ("prefixes", "re/a.", ["a*", "ab"], {"a*", "ab"}),
    ("prefixes", "tensor/t1", ["tensor/t1"], {"tensor/t1"}),
    ("prefixes", "op/ConvTranspose", ["a*"], {"a*"}),
]
DIAMOND = ["net/relu:0", "net/left:0", "net/right:0", "net/add:0"]
# File, settings of `backend`, the names the last selector matches, and the operators that become float.
BY_LISTS: list[tuple[str, dict[str, Any], list[str], set[str]]] = [
    ("colons", {"exclude": [{"from": ["net/relu:0"], "to": ["net/add:0"]}]}, DIAMOND, set(COLONS[1:4])),
    ("colons", {"exclude": [{"from": "net/left:0", "to": "net/add:0"}]}, ["net/left:0", "net/add:0"],
     {"net/left:0", "net/add:0"}),
    ("colons", {"exclude": [{"from": ["net/left:0", "net/right:0"], "to": ["op/Add"]}]}, DIAMOND[1:],
     set(COLONS[1:4])),
    ("colons", {"exclude": ["subgraph/head"], "subgraphs": {"head": {"from": "pool", "to": "re/head/.*"}}},
     ["pool", "flat", "head/fc:0"], {"head/fc:0"}),
    ("colons", {"only": ["net/conv:0"]}, ["net/left:0", "net/right:0", "net/add:0", "pool", "flat", "head/fc:0"],
     set(COLONS[1:])),
    ("colons", {"only": ["op/Conv"], "exclude": ["net/right:0"]}, ["net/right:0"],
     {"net/right:0", "net/add:0", "head/fc:0"}),
    ("json", {"exclude": [J2, "block[1]"]}, ["block[1]"], {J2, "block[1]"}),
    ("json", {"only": [{"from": [J2], "to": ["block[0]"]}]}, [J1, "block[1]", "block0"], {J1, "block[1]", "block0"}),
    ("json", {"exclude": [{"from": [J1], "to": [J2]}]}, [J1, J2], {J1, J2}),
    ("dots", {"exclude": [{"from": ["layer.1.*"], "to": ["layer.10.*"]}]}, ["layer.1.conv", "layer.10.conv"],
     {"layer.1.conv", "layer.10.conv"}),
    ("prefixes", {"exclude": [{"from": ["re/a.*"], "to": ["ab"]}]}, ["re/a.*", "a*", "ab"], {"re/a.*", "a*", "ab"}),
]  # fmt: skip
# File, selector, settings, the names it matches, and the resulting type, scale and zero_point of a tensor.
BY_TENSOR: list[tuple[str, str, dict[str, Any], list[str], str, tuple[Any, ...]]] = [
    ("colons", "tensor/b:0", {"activation_scale": 0.05, "activation_zero_point": 120}, ["net/left:0"], "b:0",
     ("uint8", 0.05, 120)),
    ("colons", "tensor/x:0", {"activation_range": [-2.55, 2.55], "activation_dtype": "int8"}, ["x:0"], "x:0",
     ("int8", 5.1 / 255, 0)),
    ("colons", "input/0/net/left:0", {"activation_range": [0, 5.1]}, ["net/relu:0"], "r:0", ("uint8", 0.02, 0)),
    ("colons", "input/1/net/add:0", {"activation_scale": 0.1, "activation_symmetric": True}, ["net/right:0"],
     "c:0", ("uint8", 0.1, 128)),
    ("json", "tensor/{2}", {"activation_dtype": "int16", "activation_scale": 0.001, "activation_zero_point": 5},
     [J2], "{2}", ("int16", 0.001, 5)),
    ("json", f"input/0/{J2}", {"activation_range": [-4.0, 4.0], "activation_reduce_range": True}, [J1], "{1}",
     ("uint8", 8 / 127, 64)),
    ("prefixes", "tensor/t4", {"activation_range": [-1, 1], "activation_dtype": "uint16"}, ["ab"], "t4",
     ("uint16", 2 / 65535, 32768)),
]  # fmt: skip
# File, selector, settings, the names it matches, and the resulting scales of the weight.
BY_WEIGHT: list[tuple[str, str, dict[str, Any], list[str], list[float]]] = [
    ("colons", "tensor/b:0.w", {"weight_scale": 0.01}, ["net/left:0"], [0.01] * 4),
    ("colons", "input/1/head/fc:0", {"weight_range": [-1.27, 1.27], "weight_axis": 1}, ["head/fc:0"], [0.01] * 5),
    ("json", J1, {"weight_scale": [0.01, 0.02, 0.03, 0.04]}, [J1], [0.01, 0.02, 0.03, 0.04]),
    ("dots", "re/größe.*", {"weight_range": [-1.27, 1], "weight_granularity": "per_tensor"}, ["größe der 面"],
     [0.01]),
    ("prefixes", "a*", {"weight_scale": 0.02, "weight_axis": 1}, ["a*"], [0.02] * 4),
]  # fmt: skip


@pytest.mark.parametrize(("file", "selector", "names", "floats"), BY_NAME)
def test_a_selector_leaves_operators_float(
    file: str, selector: str, names: list[str], floats: set[str], tmp_path: Path
) -> None:
    written = quantized(tmp_path, file, {"overrides": {selector: FLOAT}})
    assert matched(written) == [names]
    assert Read(written.path).in_float() == floats


@pytest.mark.parametrize(("file", "backend", "names", "floats"), BY_LISTS)
def test_lists_and_subgraphs_leave_operators_float(
    file: str, backend: dict[str, Any], names: list[str], floats: set[str], tmp_path: Path
) -> None:
    written = quantized(tmp_path, file, backend)
    assert matched(written)[-1] == names
    assert Read(written.path).in_float() == floats
    same(written, feeds())


@pytest.mark.parametrize(("file", "selector", "settings", "names", "tensor", "pair"), BY_TENSOR)
def test_a_tensor_has_what_is_given(
    file: str,
    selector: str,
    settings: dict[str, Any],
    names: list[str],
    tensor: str,
    pair: tuple[str, float, int],
    tmp_path: Path,
) -> None:
    written = quantized(tmp_path, file, {"overrides": {selector: settings}})
    assert matched(written) == [names]
    kind, scale, zero = Read(written.path).activation(tensor)
    assert (kind, zero) == (pair[0], pair[2])
    assert scale == pytest.approx(pair[1], rel=1e-6)
    same(written, feeds())


@pytest.mark.parametrize(("file", "selector", "settings", "names", "scales"), BY_WEIGHT)
def test_a_weight_has_what_is_given(
    file: str, selector: str, settings: dict[str, Any], names: list[str], scales: list[float], tmp_path: Path
) -> None:
    written = quantized(tmp_path, file, {"overrides": {selector: settings}})
    assert matched(written) == [names]
    kind, found = Read(written.path).weight(names[0])
    assert kind == "int8"
    assert np.allclose(found, scales, rtol=1e-6)
    same(written, feeds())


def test_there_are_forty_selectors_and_more() -> None:
    assert len(BY_NAME) + len(BY_LISTS) + len(BY_TENSOR) + len(BY_WEIGHT) >= 40
