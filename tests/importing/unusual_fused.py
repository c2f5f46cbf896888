"""Files with com.microsoft operators, like those that ONNX Runtime's optimizer writes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from small_nets import Net, between, floats
from unusual import MICROSOFT, Unusual, file, linear, of_microsoft


@file("FusedConv of each activation")
def _fused_convolutions(net: Net) -> Unusual:
    kinds = {
        "Relu": [],
        "LeakyRelu": [0.2],
        "Clip": [0.0, 6.0],
        "HardSigmoid": [0.2, 0.5],
        "Sigmoid": [],
        "Tanh": [],
    }
    y, inputs = "x", 3
    for kind, numbers in kinds.items():
        more: dict[str, Any] = {"activation_params": numbers} if numbers else {}
        given = net.constant(floats(8, inputs, 3, 3)), net.constant(floats(8))
        y, inputs = (
            net.add("FusedConv", y, *given, domain=MICROSOFT, activation=kind, pads=[1] * 4, **more),
            8,
        )
    return Unusual([y], pairs=6, imports=of_microsoft(), inlined=True, least=10)


@file("FusedConv with a sum")
def _fused_sum(net: Net) -> Unusual:
    a = net.conv("x", 8, 3)
    given = net.constant(floats(8, 8, 3, 3)), net.constant(floats(8))
    b = net.add("FusedConv", a, *given, a, domain=MICROSOFT, activation="Relu", pads=[1] * 4)
    return Unusual([net.conv(b, 4, 8)], pairs=4, imports=of_microsoft(), inlined=True)


@file("FusedGemm and FusedMatMul")
def _fused_products(net: Net) -> Unusual:
    given = net.constant(floats(16, 12)), net.constant(floats(16))
    a = net.add(
        "FusedGemm", "x", *given, domain=MICROSOFT, activation="LeakyRelu", activation_alpha=0.1, transB=1
    )
    b = net.add("FusedMatMul", a, net.constant(floats(8, 16)), domain=MICROSOFT, transB=1, alpha=0.5)
    c = net.add(
        "FusedGemm",
        b,
        net.constant(floats(8, 4)),
        net.constant(floats(4)),
        domain=MICROSOFT,
        activation="Relu",
    )
    return Unusual([c], {"x": floats(5, 12)}, pairs=3, imports=of_microsoft(), inlined=True)


@file("a transformer of ONNX Runtime's operators")
def _transformer(net: Net) -> Unusual:
    def norm(*inputs: str) -> str:
        given = net.constant(between(0.5, 1.5, 16)), net.constant(floats(16))
        return net.add("SkipLayerNormalization", *inputs, *given, domain=MICROSOFT, epsilon=1e-5, outputs=4)

    rows = linear(net, "x", 12, 16)
    heads = net.add(
        "Attention",
        rows,
        net.constant(floats(16, 48)),
        net.constant(floats(48)),
        domain=MICROSOFT,
        num_heads=4,
    )
    a = norm(heads, rows)
    hidden = net.add("BiasGelu", linear(net, a, 16, 32), net.constant(floats(32)), domain=MICROSOFT)
    b = norm(linear(net, hidden, 32, 16), f"{a}3")
    hidden = net.add("FastGelu", linear(net, b, 16, 32), net.constant(floats(32)), domain=MICROSOFT)
    hidden = net.add("QuickGelu", linear(net, hidden, 32, 16), domain=MICROSOFT, alpha=1.702)
    y = net.add("Gelu", linear(net, hidden, 16, 16), domain=MICROSOFT)
    return Unusual([linear(net, y, 16, 4)], {"x": floats(2, 5, 12)}, pairs=6, imports=of_microsoft())


@file("EmbedLayerNormalization")
def _embeddings(net: Net) -> Unusual:
    tables = [net.constant(floats(size, 16)) for size in (20, 8, 2)]
    scale = net.constant(between(0.5, 1.5, 16)), net.constant(floats(16))
    rows = net.add("EmbedLayerNormalization", "ids", "", *tables[:2], "", *scale, domain=MICROSOFT, outputs=2)
    ids = np.array([[1, 5, 0], [19, 7, 7]], np.int32)
    return Unusual([linear(net, rows, 16, 4)], {"ids": ids}, imports=of_microsoft())


def _optimized(model: onnx.ModelProto) -> None:
    """Replaces a model with ONNX Runtime's optimized one, without processor-specific layouts."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        model.CopyFrom(onnx.load(options.optimized_model_filepath))


@file("convolutions from ONNX Runtime's optimizer")
def _optimized_image(net: Net) -> Unusual:
    a = net.add("Relu", net.norm(net.conv("x", 8, 3, bias=False), 8))
    b = net.add("Relu", net.add("Add", net.norm(net.conv(a, 8, 8), 8), a))
    c = net.add("LeakyRelu", net.conv(b, 8, 8), alpha=0.2)
    d = net.add("Clip", net.conv(c, 8, 8), net.constant(np.float32(0)), net.constant(np.float32(6)))
    return Unusual(
        [net.head(net.add("HardSigmoid", net.conv(d, 8, 8)), 8)],
        pairs=6,
        edit=_optimized,
        inlined=True,
        least=10,
    )


@file("a block of attention from ONNX Runtime's optimizer")
def _optimized_attention(net: Net) -> Unusual:
    def norm(x: str) -> str:
        return net.add("LayerNormalization", x, net.constant(between(0.5, 1.5, 16)), net.constant(floats(16)))

    def gelu(x: str) -> str:
        erf = net.add("Erf", net.add("Div", x, net.constant(np.float32(np.sqrt(2)))))
        return net.add(
            "Mul",
            net.add("Mul", x, net.add("Add", erf, net.constant(np.float32(1)))),
            net.constant(np.float32(0.5)),
        )

    rows = norm(net.add("Add", linear(net, "x", 12, 16), net.constant(floats(16))))
    scores = net.add("MatMul", rows, net.add("Transpose", linear(net, rows, 16, 16), perm=[0, 2, 1]))
    mixed = net.add(
        "MatMul",
        net.add("Softmax", net.add("Div", scores, net.constant(np.float32(4)))),
        linear(net, rows, 16, 16),
    )
    rows = norm(net.add("Add", rows, mixed))
    hidden = gelu(net.add("Add", linear(net, rows, 16, 32), net.constant(floats(32))))
    return Unusual(
        [linear(net, hidden, 32, 4)], {"x": floats(2, 5, 12)}, pairs=4, edit=_optimized, inlined=True
    )
