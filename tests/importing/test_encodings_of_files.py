"""Tests of reading encodings from quantized files of any tool, under the tensor names of the float file."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from aimet_samples import SAMPLES
from chain import shipped
from clean_nets import Arrays, save
from onnx import helper, numpy_helper

from qatkit.importing.encodings import encodings_of
from qatkit.records.encodings import encodings_from
from qatkit_verify.errors import ConfigError

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "com.amd.quark" : 1, "com.vai.quantize" : 1]>'


def test_pairs_of_all_domains_and_types_are_read(tmp_path: Path) -> None:
    text = f"""{HEAD} net (float[1, 8] x) => (float[1, 8] y) {{
      a = QuantizeLinear (x, s, z8)
      b = DequantizeLinear (a, s, z8)
      c = com.microsoft.QuantizeLinear (b, s2, z16)
      d = com.microsoft.DequantizeLinear (c, s2, z16)
      e = com.amd.quark.ExtendedQuantizeLinear (d, s, zs16)
      f = com.amd.quark.ExtendedDequantizeLinear (e, s, zs16)
      g = com.vai.quantize.VitisQuantizeLinear (f, s2, zi8)
      h = com.vai.quantize.VitisDequantizeLinear (g, s2, zi8)
      i = QuantizeLinear <output_dtype = 17> (h, s)
      k = DequantizeLinear (i, s)
      w_DequantizeLinear_Output = DequantizeLinear <axis = 0, block_size = 2> (w_quantized, wb, wz)
      v = DequantizeLinear <axis = -1> (v_quantized, vs)
      m = MatMul (k, w_DequantizeLinear_Output)
      n = Add (m, v)
      y_before = Relu (n)
      o = QuantizeLinear (y_before, s, z8)
      y = DequantizeLinear (o, s, z8)
    }}"""
    held: Arrays = {
        "s": np.asarray(0.1, np.float32),
        "s2": np.asarray([0.3], np.float32),
        "z8": np.asarray(3, np.uint8),
        "z16": np.asarray([40000], np.uint16),
        "zs16": np.asarray(-7, np.int16),
        "zi8": np.asarray([5], np.int8),
        "w_quantized": np.arange(64).reshape(8, 8).astype(ml_dtypes.int4),
        "wb": np.linspace(0.1, 0.9, 32, dtype=np.float32).reshape(4, 8),
        "wz": np.ones((4, 8)).astype(ml_dtypes.int4),
        "v_quantized": np.arange(8, dtype=np.int32),
        "vs": np.linspace(0.1, 0.9, 8, dtype=np.float32),
    }
    found = encodings_of(save(tmp_path / "net.onnx", text, held))
    assert {name: (one.dtype, one.zero_point.tolist()) for name, one in found.activations.items()} == {
        "x": ("uint8", 3),
        "b": ("uint16", 40000),
        "d": ("int16", -7),
        "f": ("int8", 5),
        "h": ("float8e4m3fn", 0),
        "y": ("uint8", 3),
    }
    assert found.activations["b"].scale.tobytes() == held["s2"].tobytes()
    weight, bias = found.parameters["w"], found.parameters["v"]
    assert (weight.dtype, weight.axis, weight.block_size) == ("int4", 0, 2)
    assert np.array_equal(weight.scale, held["wb"]) and (weight.zero_point == 1).all()
    assert (bias.dtype, bias.axis, bias.scale.shape) == ("int32", 0, (8,))
    assert found.notes == ()


def test_aimets_pairs_have_the_numbers_of_its_json() -> None:
    found = encodings_of(SAMPLES / "per_channel.qdq.onnx")
    listed = encodings_from(SAMPLES / "per_channel.2.0.0.json", "calibration.encodings")
    assert found.activations.keys() == listed.activations.keys()
    biases = {name for name in listed.parameters if "bias" in name}
    assert found.parameters.keys() == listed.parameters.keys() - biases
    for name, one in found.all.items():
        assert one.equals(listed.all[name]), name


def test_pairs_of_a_pytorch_model_are_listed_once_a_tensor() -> None:
    shipped_vit = shipped("vit")
    found = encodings_of(shipped_vit.path)
    graph = onnx.load(shipped_vit.path).graph
    held = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    pairs = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert found.activations.keys() == {node.input[0] for node in pairs}
    for node in pairs:
        one = found.activations[node.input[0]]
        assert one.scale.tobytes() == held[node.input[1]].tobytes()
        assert one.zero_point == held[node.input[2]]
    weights = {name for name, one in found.parameters.items() if one.dtype == "int8"}
    assert weights == {name for name, one in held.items() if one.dtype == np.int8 and one.ndim > 1}
    assert sum(one.dtype == "int32" for one in found.parameters.values()) == 10


def test_constants_with_equal_bytes_keep_their_names(tmp_path: Path) -> None:
    """Tools store equal constants once, under the first one's name.

    The names then have to come from the outputs or scales of the DequantizeLinears.
    """
    text = f"""{HEAD} net (float[1, 4] x) => (float[1, 4] y) {{
      w_DequantizeLinear_Output = DequantizeLinear (w_quantized, s)
      v_DequantizeLinear_Output = DequantizeLinear (w_quantized, t)
      b = DequantizeLinear (w_quantized, u_scale)
      p = Add (x, w_DequantizeLinear_Output)
      q = Add (p, v_DequantizeLinear_Output)
      y = Add (q, b)
    }}"""
    scales = {name: np.asarray(number, np.float32) for name, number in (("s", 1), ("t", 2), ("u_scale", 3))}
    found = encodings_of(save(tmp_path / "net.onnx", text, {**scales, "w_quantized": np.ones(4, np.int8)}))
    assert {name: one.scale.tolist() for name, one in found.parameters.items()} == {"w": 1, "v": 2, "u": 3}


def test_what_has_no_pairs_is_said(tmp_path: Path) -> None:
    text = f"""{HEAD} net (float[1, 4] x) => (float[1, 4] y) {{
      q, s, z = DynamicQuantizeLinear (x)
      y = DequantizeLinear (q, s, z)
    }}"""
    told = (
        r"no QuantizeLinear or DequantizeLinear with constant scales; scales of 1 DynamicQuantizeLinear can"
    )
    with pytest.raises(ConfigError, match=told):
        encodings_of(save(tmp_path / "net.onnx", text, {}))


def test_functions_of_number_formats_are_noted(tmp_path: Path) -> None:
    """A function of the domain `qatkit` has no zero point; its name is the number format it rounds to."""
    double = helper.make_function(
        "qatkit", "mxint8", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 13)],
    )  # fmt: skip
    ends = [helper.make_tensor_value_info(name, 1, [2]) for name in ("x", "y")]
    graph = helper.make_graph(
        [helper.make_node("mxint8", ["x"], ["y"], domain="qatkit")], "g", ends[:1], ends[1:]
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("qatkit", 1)]
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, functions=[double], opset_imports=opsets, ir_version=8), str(path))
    found = encodings_of(path)
    assert (found.formats, found.all) == ({"x": "mxint8"}, {})
