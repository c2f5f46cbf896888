"""Tests of the comparison of a cleaned file with the original on inputs that the original accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from clean_nets import cleaned, drawn, save

from qatkit.export.clean.drawn import given, ports
from qatkit.export.clean.proof import EQUAL, prove
from qatkit.importing.read import read
from qatkit_verify.errors import ConfigError

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'


def test_sizes_and_ids_are_drawn_that_the_file_takes(tmp_path: Path) -> None:
    text = f"""{HEAD}
    net (int64[batch, length] ids, float[batch, length] mask, bool[batch] on) => (float[batch, 3] y) {{
      rows = Gather (table, ids)
      shape = Constant <value_ints = [-1, 192]> ()
      flat = Reshape (rows, shape)
      m = MatMul (flat, w)
      s = ReduceMax <axes = [1]> (mask)
      n = Add (m, s)
      axis = Constant <value_ints = [1]> ()
      column = Unsqueeze (on, axis)
      y = Where (column, n, m)
    }}"""
    net = save(tmp_path / "net.onnx", text, {"table": drawn(2, 3), "w": drawn(192, 3)})
    found, _ = cleaned(net, fold="exact")
    assert [one["ids"] for one in found.proof.inputs] == [[1, 64], [2, 64]]  # the first size tried is 32
    assert found.proof.outputs == {"y": EQUAL}


def test_a_file_that_runs_on_nothing_drawn_says_what_to_give(tmp_path: Path) -> None:
    text = f"""{HEAD} net (float[n, k] x) => (float[n, 3] y) {{ y = MatMul (x, w) }}"""
    net = save(tmp_path / "net.onnx", text, {"w": drawn(77, 3)})
    with pytest.raises(
        ConfigError, match=r"clean.inputs=null: the model accepts none of .*clean.inputs=FILE.npz"
    ):
        cleaned(net)
    np.savez(tmp_path / "given.npz", x=drawn(2, 77))
    found, _ = cleaned(net, inputs=f"{tmp_path / 'given.npz'}")
    assert found.proof.inputs == [{"x": [2, 77]}]


@pytest.mark.parametrize(
    ("bound", "scale", "holds"), [(EQUAL, 1.00001, False), (80, 1.00001, True), (80, 1.001, False)]
)
def test_a_difference_beyond_the_bound_is_refused(
    bound: float, scale: float, holds: bool, tmp_path: Path
) -> None:
    text = f"{HEAD} net (float[2, 4] x) => (float[2, 3] y) {{ y = MatMul (x, w) }}"
    before = save(tmp_path / "before.onnx", text, {"w": drawn(4, 3)})
    after = save(tmp_path / "after.onnx", text, {"w": drawn(4, 3) * np.float32(scale)})

    def proof() -> float:
        found = prove(before, after, ports(read(before, as_is=True), before), layout={}, names={"x": "x", "y": "y"},
                      bound=bound, inputs=None, threads=1)  # fmt: skip
        return found.outputs["y"]

    if holds:
        assert proof() == pytest.approx(100, abs=1)  # a factor of 1.00001 in dB
    else:
        with pytest.raises(
            ConfigError,
            match=r"onnx=.*before.onnx: after cleaning, output 'y' differs from the original file's \(.* dB\), where",
        ):
            proof()


@pytest.mark.parametrize("name", ["cut.npz", "empty.npz", "one.npy", "missing.npz"])
def test_inputs_that_cannot_be_read_are_refused(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "cut.npz", x=drawn(2, 77))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:100])
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "one.npy", drawn(2, 77))
    told = "expected an .npz file that exists" if name == "missing.npz" else "the file can't be read as .npz"
    with pytest.raises(ConfigError, match=f"clean.inputs=.*{name}: {told}"):
        given(tmp_path / name, [])


def test_other_whole_numbers_are_refused(tmp_path: Path) -> None:
    def net(name: str, most: int) -> Path:
        text = f"{HEAD} n (float[2, 4] x) => (int64[2, 1] y) {{ y = {'ArgMax' if most else 'ArgMin'} <axis = 1> (x) }}"
        return save(tmp_path / name, text)

    before, after = net("before.onnx", 1), net("after.onnx", 0)
    with pytest.raises(
        ConfigError, match="output 'y' differs from the original file's, where equal values are required"
    ):
        prove(before, after, ports(read(before, as_is=True), before), layout={}, names={"x": "x", "y": "y"}, bound=30,
              inputs=None, threads=1)  # fmt: skip


def test_texts_are_no_input_that_is_drawn(tmp_path: Path) -> None:
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.STRING, [2])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, [2])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [info], [out])
    onnx.save(onnx.helper.make_model(graph, ir_version=8), tmp_path / "net.onnx")
    with pytest.raises(ConfigError, match="is not a tensor of numbers"):
        cleaned(tmp_path / "net.onnx")
