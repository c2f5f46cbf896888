"""Tests of fixed sizes for dynamic axes, given by name or by input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from clean_nets import cleaned, drawn, kinds, reference, run, save, sizes

from qatkit_verify.errors import ConfigError

NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[batch, 3, height, width] x, float[batch, 4] bias) => (float[batch, rows] y, float[batch, 4] z) {
  n = Shape (x)
  zero = Constant <value_int = 0> ()
  b = Gather (n, zero)
  axes = Constant <value_ints = [0]> ()
  one = Unsqueeze (b, axes)
  rest = Constant <value_ints = [-1]> ()
  shape = Concat <axis = 0> (one, rest)
  c = Conv (x, w)
  y = Reshape (c, shape)
  z = Relu (bias)
}"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return save(tmp_path / "net.onnx", NET, {"w": drawn(5, 3, 3, 3)})


@pytest.mark.parametrize(
    "asked",
    [
        {"batch": 2, "height": 6, "width": 7},
        {"x": {0: 2, 2: 6, "3": 7}},
        {"x[0]": 2, "x[2]": 6, "x[3]": 7},
        {"x": [2, 3, 6, 7]},
    ],
    ids=["names", "axes", "places", "all axes"],
)
def test_sizes_are_fixed_throughout_the_file(net: Path, asked: dict[str, object]) -> None:
    found, model = cleaned(net, fix_shapes=asked, fold="exact")
    assert [sizes(one) for one in model.graph.input] == [[2, 3, 6, 7], [2, 4]]
    assert [sizes(one) for one in model.graph.output] == [[2, 5 * 4 * 5], [2, 4]]
    assert sorted(kinds(model)) == ["Conv", "Relu", "Reshape"]
    assert {one.name: sizes(one) for one in model.graph.value_info}["c"] == [2, 5, 4, 5]
    feeds = {"x": drawn(2, 3, 6, 7), "bias": drawn(2, 4)}
    for ours, exact in zip(run(found.files[0], feeds), reference(net, feeds), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"hight": 6},
            r"clean.fix_shapes.hight=6: the file has no size and no input of this name, only .* \(did you mean height",
        ),
        ({"x[1]": 4}, "axis 1 of input 'x' has size 3 in the file, not 4"),
        ({"x[4]": 7}, r"clean.fix_shapes.x\[4\]=7: input 'x' has no axis 4, only axes 0 to 3"),
        ({"x": [1, 3]}, "expected a list of 4 sizes, one for each axis of the input"),
        ({"x": {"a": 1}}, "expected the number of an axis"),
        ({"batch": 0}, "expected an integer of at least 1"),
        ({"batch": 1, "x[0]": 2}, "the size 'batch' gets two values, 1 and 2; give one"),
        ({"x[0]": 2, "batch": 1}, "the size 'batch' gets two values, 2 and 1; give one"),
        ({"x": 3}, "expected sizes by axis"),
    ],
)
def test_a_wrong_size_is_one_sentence(net: Path, asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cleaned(net, fix_shapes=asked)
    assert list((net.parent / "cleaned").iterdir()) == []


def test_an_axis_without_a_name_is_fixed_alone(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 13]> g (float[?, ?] x) => (float[?, ?] y) { y = Relu (x) }'
    _, model = cleaned(save(tmp_path / "net.onnx", text), fix_shapes={"x[1]": 5})
    assert sizes(model.graph.input[0])[1] == sizes(model.graph.output[0])[1] == 5
    assert not isinstance(sizes(model.graph.input[0])[0], int)
