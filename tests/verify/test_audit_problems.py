"""Tests of the audit on files with one fault each, as ONNX Runtime executes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from qdq_graphs import (
    IMAGE,
    INPUT_SCALE,
    OUTPUT_SCALE,
    TOKENS,
    QdqGraph,
    float_weight,
    matmul_add,
    self_quantized,
)

from qatkit.verify.audit import audit
from qatkit_verify.installed import version_numbers
from qatkit_verify.session import open_session

# Each case breaks one thing; its line has the operator's name and the reason.


def _no_output_pair(graph: QdqGraph) -> str:
    first = graph.quantize(
        graph.conv(graph.quantize("input", "in_q", INPUT_SCALE), "c1"), "c1_q", OUTPUT_SCALE
    )
    return graph.conv(first, "c2", OUTPUT_SCALE)


def _no_input_pair(graph: QdqGraph) -> str:
    return graph.quantize(graph.conv("input", "c1"), "c1_q", OUTPUT_SCALE)


def _two_output_pairs(graph: QdqGraph) -> str:
    output = graph.conv(graph.quantize("input", "in_q", INPUT_SCALE), "c1")
    pairs = [graph.quantize(output, "a_q", 0.05), graph.quantize(output, "b_q", 0.06)]
    return graph.node("Add", pairs, "add")


def _float_reader(graph: QdqGraph) -> str:
    output = graph.conv(graph.quantize("input", "in_q", INPUT_SCALE), "c1")
    return graph.node("Add", [graph.quantize(output, "a_q", 0.05), output], "add")


def _relu_zero_point(graph: QdqGraph) -> str:
    output = graph.conv(graph.quantize("input", "in_q", INPUT_SCALE), "c1")
    return graph.quantize(graph.node("Relu", [output], "relu"), "relu_q", OUTPUT_SCALE, zero=100)


def _relu_int8(graph: QdqGraph) -> str:
    image = graph.quantize("input", "in_q", INPUT_SCALE, zero=0, dtype=np.int8)
    output = graph.node("Relu", [graph.conv(image, "c1")], "relu")
    return graph.quantize(output, "relu_q", OUTPUT_SCALE, zero=0, dtype=np.int8)


def _clip_range(graph: QdqGraph) -> str:
    bounds = [graph.constant("low", 0), graph.constant("high", 6)]
    output = graph.conv(graph.quantize("input", "in_q", INPUT_SCALE), "c1")
    return graph.quantize(graph.node("Clip", [output, *bounds], "clip"), "clip_q", OUTPUT_SCALE, zero=0)


def _silu(graph: QdqGraph) -> str:
    output = graph.conv(graph.quantize("input", "in_q", INPUT_SCALE), "c1")
    gate = graph.node("Sigmoid", [output], "sigmoid")
    return graph.quantize(graph.node("Mul", [output, gate], "mul"), "mul_q", OUTPUT_SCALE)


def _bias_scale(graph: QdqGraph) -> str:
    output = graph.conv(graph.quantize("input", "in_q", INPUT_SCALE), "c1", bias_error=1.1)
    return graph.quantize(output, "c1_q", OUTPUT_SCALE)


def _pool_scales(graph: QdqGraph) -> str:
    image = graph.quantize("input", "in_q", INPUT_SCALE)
    pooled = graph.node("MaxPool", [image], "pool", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    return graph.quantize(pooled, "pool_q", OUTPUT_SCALE)


IMAGE_CASES: dict[str, tuple[Callable[[QdqGraph], str], str]] = {
    "no output pair": (_no_output_pair, "float Conv 'c2': its output has no QuantizeLinear"),
    "no input pair": (_no_input_pair, "float Conv 'c1': its input has no DequantizeLinear"),
    "two output pairs": (_two_output_pairs, "float Conv 'c1': two QuantizeLinear on its output"),
    "float reader": (_float_reader, "float Conv 'c1': its output is also read in float by Add 'add'"),
    "relu zero point": (
        _relu_zero_point,
        "float FusedConv 'c1': Relu before a QuantizeLinear of zero point 100",
    ),
    "relu int8": (
        _relu_int8,
        "float FusedConv 'c1': Relu before a QuantizeLinear of zero point 0 (must be -128)",
    ),
    "clip range": (_clip_range, "float FusedConv 'c1': Clip 'clip' does not coincide with the range"),
    "silu": (_silu, "float Conv 'c1': its output has no QuantizeLinear (it goes to Sigmoid 'sigmoid')"),
    "bias scale": (
        _bias_scale,
        # Before ONNX Runtime 1.27, a Conv accepts such a bias; since then, the Conv runs in float.
        "{} 'c1': its bias scale is off from input scale x weight scale by 10.0 %".format(
            "int8 QLinearConv" if version_numbers(ort.__version__) < (1, 27) else "float Conv"
        ),
    ),
    "float weight": (float_weight, "float Conv 'c1': its weight is float in the file"),
    "quantized by ONNX Runtime": (self_quantized, "int8 QLinearConv 'c1': its weight is float in the file"),
    "pool scales": (_pool_scales, "float MaxPool 'pool': input and output have different scales"),
}


@pytest.mark.parametrize("case", IMAGE_CASES)
def test_one_broken_thing_in_a_cnn(case: str, tmp_path: Path) -> None:
    build, line = IMAGE_CASES[case]
    graph = QdqGraph()
    result = audit(graph.save(tmp_path / "bad.onnx", build(graph), IMAGE, 4))
    assert len(result.problems) == 1, result.problems
    assert result.problems[0].startswith(line)
    assert not result.ok


def _float_bias(graph: QdqGraph) -> str:
    image = graph.quantize("input", "in_q", INPUT_SCALE)
    weight = graph.weight("fc.weight", (16, 16))
    return graph.node("Gemm", [image, weight, graph.constant("fc.bias", np.ones(16))], "fc", transB=1)


def _float_bias_relu(graph: QdqGraph) -> str:
    return graph.node("Relu", [_float_bias(graph)], "relu")


@pytest.mark.parametrize(("build", "op"), [(_float_bias, "Gemm"), (_float_bias_relu, "FusedGemm")])
def test_float_bias_without_output_pair(build: Callable[[QdqGraph], str], op: str, tmp_path: Path) -> None:
    graph = QdqGraph()
    result = audit(graph.save(tmp_path / "bad.onnx", build(graph), ("N", 16), 2))
    assert result.problems == (
        f"float {op} 'fc': its bias is float and its output has no QuantizeLinear;"
        " the int8 kernel for this case needs an int32 bias (backend.bias_dtype=int32);"
        " its weight (1.0 kB) is dequantized on every run",
    )
    assert [(item.kind, item.bytes) for item in result.runtime_dequantize] == [("weight", 1024)]


def test_an_int8_gemm_whose_bias_has_another_scale_is_a_problem(tmp_path: Path) -> None:
    """ONNX Runtime deviates from the file: it scales the bias by input scale times weight scale."""
    graph = QdqGraph()
    image = graph.quantize("input", "in_q", INPUT_SCALE)
    inputs = [
        image,
        graph.weight("fc.weight", (16, 16)),
        graph.bias("fc.bias", "fc.weight", INPUT_SCALE, 1.1),
    ]
    path = graph.save(tmp_path / "bad.onnx", graph.node("Gemm", inputs, "fc", transB=1), ("N", 16), 2)

    assert audit(path).problems == (
        "int8 QGemm 'fc': its bias scale is off from input scale x weight scale by 10.0 % (1 % allowed)",
    )
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    plain, fast = (
        open_session(path, threads=1, optimize=o).run(None, {"input": x})[0] for o in (False, True)
    )
    scales, steps = (graph.initializers[f"fc.bias_{part}"] for part in ("scale", "q"))
    np.testing.assert_allclose(
        plain - fast, np.broadcast_to(scales * steps * (1 - 1 / 1.1), (4, 16)), atol=1e-5
    )


def test_matmul_add_becomes_a_float_gemm_only_with_static_shapes(tmp_path: Path) -> None:
    static, dynamic = QdqGraph(), QdqGraph()
    bad = audit(static.save(tmp_path / "static.onnx", matmul_add(static), (1, 5, 16), 3))
    good = audit(dynamic.save(tmp_path / "dynamic.onnx", matmul_add(dynamic), TOKENS, 3))
    assert bad.problems[0].startswith(
        "float Gemm 'fc': ONNX Runtime merged it with the float bias of Add 'fc/add' into one Gemm"
    )
    assert good.ok
    assert good.ops["MatMulIntegerToFloat"] == {"int8": 1}


def _reshaped_weight(graph: QdqGraph) -> str:
    image = graph.quantize("input", "in_q", INPUT_SCALE)
    shape = graph.constant("shape", [16, 16], np.int64)
    weight = graph.node("Reshape", [graph.weight("fc.weight", (256,)), shape], "fc/reshape")
    return graph.node("MatMul", [image, weight], "fc")


def test_weight_behind_a_reshape(tmp_path: Path) -> None:
    graph = QdqGraph()
    result = audit(graph.save(tmp_path / "bad.onnx", _reshaped_weight(graph), TOKENS, 3))
    assert result.problems == (
        "float MatMul 'fc': Reshape is between its weight's DequantizeLinear and the operator;"
        " its weight (1.0 kB) is dequantized on every run",
    )


@pytest.mark.parametrize(
    ("elements", "problems"),
    [(256, 0), (70_000, 1)],
)
def test_large_constants_dequantized_at_run_time(elements: int, problems: int, tmp_path: Path) -> None:
    """A position embedding in 8 bits is dequantized on every run, which is a problem only if it is large."""
    graph = QdqGraph()
    parts = [
        graph.constant("position_q", np.zeros(elements), np.uint8),
        graph.constant("position_scale", 0.1),
        graph.constant("position_zero", 0, np.uint8),
    ]
    table = graph.node("DequantizeLinear", parts, "position_dq")
    path = graph.save(tmp_path / "p.onnx", graph.node("Add", ["input", table], "add"), ("N", elements), 2)
    result = audit(path)
    assert [item.kind for item in result.runtime_dequantize] == ["constant"]
    assert len(result.problems) == problems
    assert all(
        "constant 'position_q' (0.28 MB) is dequantized on every run" in line for line in result.problems
    )


def _pair_before_norm(graph: QdqGraph) -> str:
    return graph.layer_norm(graph.quantize("input", "in_q", INPUT_SCALE), "ln")


def _transpose_before_norm(graph: QdqGraph) -> str:
    return graph.layer_norm(graph.node("Transpose", ["input"], "turn", perm=[0, 2, 1]), "ln")


@pytest.mark.parametrize(
    ("build", "shape", "blocker"),
    [
        (_pair_before_norm, TOKENS, "a DequantizeLinear comes right before it"),
        (_transpose_before_norm, ("N", 16, 5), "a Transpose comes right before it"),
    ],
)
def test_layer_norm_left_in_pieces(
    build: Callable[[QdqGraph], str], shape: tuple[int | str, ...], blocker: str, tmp_path: Path
) -> None:
    graph = QdqGraph()
    result = audit(graph.save(tmp_path / "bad.onnx", build(graph), shape, 3))
    assert "SimplifiedLayerNormalization" in result.ops
    assert result.problems == (
        f"LayerNorm at 'ln/sub' is not fused: it became a SimplifiedLayerNormalization; {blocker}",
    )
