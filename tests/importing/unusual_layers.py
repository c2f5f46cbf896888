"""Files with unusual forms of weighted layers: convolutions, recurrent layers and products."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx_models import FLOAT
from small_nets import Net, floats
from unusual import FILES, Build, Unusual, file, ints, linear


@file("ConvTranspose to a given shape, and in groups")
def _transposed(net: Net) -> Unusual:
    a = net.add(
        "ConvTranspose",
        net.conv("x", 8, 3),
        net.constant(floats(8, 8, 3, 3)),
        strides=[2, 2],
        output_shape=[15, 16],
    )
    b = net.add("ConvTranspose", a, net.constant(floats(8, 2, 3, 3)), net.constant(floats(8)), group=4,
                dilations=[2, 1], auto_pad="SAME_LOWER", strides=[1, 2])  # fmt: skip
    c = net.add(
        "ConvTranspose",
        b,
        net.constant(floats(8, 4, 3, 2)),
        strides=[1, 3],
        output_padding=[0, 1],
        pads=[2, 0, 1, 1],
    )
    return Unusual([net.conv(c, 4, 4)], pairs=3)


@file("ConvTranspose of one and of three axes")
def _transposed_axes(net: Net) -> Unusual:
    a = net.add("ConvTranspose", "x", net.constant(floats(6, 4, 2, 2, 2)), strides=[2, 1, 2])
    rows = net.add("Reshape", a, net.constant(ints(0, 4, -1)))
    return Unusual([net.add("ConvTranspose", rows, net.constant(floats(4, 4, 5)), strides=[2], pads=[1, 2])],
                   {"x": floats(2, 6, 2, 3, 2)})  # fmt: skip


@file("convolutions of one and three axes with uneven pads")
def _convolutions(net: Net) -> Unusual:
    a = net.add(
        "Conv", "x", net.constant(floats(8, 3, 2, 3, 2)), dilations=[1, 2, 1], pads=[0, 2, 1, 1, 2, 0]
    )
    rows = net.add("Reshape", net.add("Relu", a), net.constant(ints(0, 8, -1)))
    b = net.add(
        "Conv",
        rows,
        net.constant(floats(8, 4, 3)),
        net.constant(floats(8)),
        group=2,
        strides=[2],
        pads=[2, 0],
        dilations=[2],
    )
    return Unusual([net.add("Conv", b, net.constant(floats(4, 8, 4)), auto_pad="SAME_LOWER", strides=[3])],
                   {"x": floats(2, 3, 3, 6, 4)}, pairs=2)  # fmt: skip


def _recurrent(kind: str, **attributes: Any) -> Build:
    """Returns the builder of a recurrent layer followed by a MatMul.

    The options `states`, `peepholes` and `lengths` add these inputs. With `last`, the MatMul reads the last
    hidden state instead of those of all steps.
    """
    options = {name: attributes.pop(name, False) for name in ("states", "peepholes", "lengths", "last")}
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    sides = 2 if attributes.get("direction") == "bidirectional" else 1

    def build(net: Net) -> Unusual:
        given = ["x", net.constant(floats(sides, gates * 8, 6)), net.constant(floats(sides, gates * 8, 8)),
                 net.constant(floats(sides, 2 * gates * 8))]  # fmt: skip
        given.append(net.constant(np.full(2, 5, np.int32)) if options["lengths"] else "")
        states = 1 + (kind == "LSTM")
        given += (
            [net.constant(floats(sides, 2, 8)) for _ in range(states)] if options["states"] else [""] * states
        )
        given += [net.constant(floats(sides, 3 * 8))] if options["peepholes"] else []
        while not given[-1]:
            given.pop()
        y = net.add(kind, *given, hidden_size=8, outputs=1 + states, **attributes)
        rows = net.add("Reshape", net.add("Transpose", y, perm=[0, 2, 1, 3]), net.constant(ints(0, 0, -1)))
        ends = [f"{y}{i + 1}" for i in range(states)]
        last = net.add("Squeeze", ends[0], net.constant(ints(0))) if options["last"] else ""
        outputs = [linear(net, last, 8, 4), *ends[1:]] if last else [linear(net, rows, 8 * sides, 4), *ends]
        return Unusual(outputs, {"x": floats(5, 2, 6)}, {"x": (FLOAT, [5, 2, 6])}, pairs=0)

    return build


for _title, _build in {
    "LSTM from both sides with states": _recurrent("LSTM", direction="bidirectional", states=True),
    "LSTM in reverse, its last states alone": _recurrent("LSTM", direction="reverse", states=True, last=True),
    "LSTM with peepholes and a clip": _recurrent("LSTM", peepholes=True, clip=0.8),
    "LSTM with coupled gates": _recurrent("LSTM", input_forget=1),
    "LSTM with other activations": _recurrent("LSTM", activations=["HardSigmoid", "Softsign", "Tanh"]),
    "GRU that resets before the product": _recurrent("GRU", direction="bidirectional", states=True),
    "GRU with whole lengths": _recurrent("GRU", linear_before_reset=1, lengths=True, states=True),
    "RNN of ReLUs from both sides": _recurrent(
        "RNN", direction="bidirectional", activations=["Relu", "Relu"]
    ),
    "RNN of mixed activations": _recurrent("RNN", direction="bidirectional", activations=["Tanh", "Relu"]),
}.items():
    FILES[_title] = _build


@file("products of batches, with broadcasts")
def _products(net: Net) -> Unusual:
    a = net.add("Reshape", linear(net, "x", 12, 16), net.constant(ints(0, 0, 4, 4)))
    b = net.add("MatMul", a, net.add("Transpose", a, perm=[0, 1, 3, 2]))
    c = net.add("MatMul", b, net.constant(floats(5, 4, 3)))
    d = net.add("MatMul", net.constant(floats(4)), c)
    e = net.add(
        "MatMul", net.add("Unsqueeze", d, net.constant(ints(1))), net.add("Transpose", d, perm=[0, 2, 1])
    )
    return Unusual([e, net.add("MatMul", c, net.constant(floats(3)))], {"x": floats(2, 5, 12)}, least=10)


@file("Gemm of every form")
def _gemms(net: Net) -> Unusual:
    a = net.add("Gemm", "x", net.constant(floats(12, 16)), net.constant(np.float32(0.5)), alpha=0.5, beta=2.0)
    b = net.add("Gemm", net.add("Tanh", a), net.constant(floats(16, 8)), net.constant(floats(4, 1)), beta=0.5)
    c = net.add("Gemm", b, net.constant(floats(4, 6)), net.constant(floats(8, 6)), transA=1)
    d = net.add("Gemm", c, c, transB=1, alpha=0.25)
    e = net.add("Gemm", net.constant(floats(8, 8)), d, net.constant(floats(1)), transB=1)
    inputs = {"x": (FLOAT, [4, 12])}
    return Unusual([e, net.add("Gemm", a, net.constant(floats(3, 16)), net.constant(floats(1, 3)), transB=1)],
                   {"x": floats(4, 12)}, inputs, least=10)  # fmt: skip


@file("Einsum of each kind")
def _einsum(net: Net) -> Unusual:
    a = net.add("Einsum", "x", net.constant(floats(12, 16)), equation="bij,jk->bik")
    b = net.add("Einsum", a, a, equation="b i d, b j d -> b i j")
    c = net.add("Einsum", b, net.constant(floats(5, 4)), equation="...i,ih")
    return Unusual([c, net.add("Einsum", b, equation="bii->bi")], {"x": floats(2, 5, 12)}, least=10)
