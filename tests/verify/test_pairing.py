"""Tests of which two products are added in 16 bits, by operator, on an emulated Haswell.

The rules are in docs/onnxruntime-qdq.md, 3f.

All weights are 0 except two along the depth K, and all activations are the largest. The outputs differ from
those of this CPU where the two products are added in 16 bits, and are equal elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper
from test_int8_kernels import QEMU
from test_third_party_files import SCRIPT
from third_party_files import MS, File, conv, file_of, gemm, integers, product, to_float

from qatkit_verify.saturation import saturates_here
from qatkit_verify.session import open_session

Weights = NDArray[np.int8]  # [K, 8]; two rows are 127


def full(*shape: int) -> NDArray[np.uint8]:
    return np.full(shape, 255, np.uint8)


def convolution(weights: Weights, channels: int, *kernel: int, **how: Any) -> File:
    """Returns a convolution; K runs over the kernel's positions and, innermost, the channels of the group."""
    weight = np.moveaxis(weights.T.reshape(-1, *kernel, channels), -1, 1)
    inputs = channels * how.get("group", 1)
    return conv(full(1, inputs, *(size + 1 for size in kernel)), np.ascontiguousarray(weight), zero=0, **how)


def dynamic(weights: Weights) -> File:
    node = helper.make_node("DynamicQuantizeMatMul", ["x", "w", "ws"], ["y"], "product", domain=MS)
    return file_of(
        [node], {"w": weights, "ws": np.float32(0.002)}, [{"x": np.ones((2, len(weights)), np.float32)}]
    )


def attention(weights: Weights) -> File:
    stored = {
        "w": np.tile(weights, 3), "b": np.zeros(24, np.float32), "as": np.float32(0.01), "ws": np.float32(0.001),
        "az": np.uint8(0), "wz": np.int8(0),
    }  # fmt: skip
    names = ["x", "w", "b", "as", "ws", "", "az", "wz"]
    node = helper.make_node("QAttention", names, ["y"], "attention", domain=MS, num_heads=2)
    return file_of([node], stored, [{"x": full(1, 3, len(weights))}])


def lstm(weights: Weights, *, recurrent: bool) -> File:
    """Returns an LSTM with two hidden units, or K if `recurrent`, because R has a row per unit."""
    hidden, depth = (len(weights), 4) if recurrent else (2, len(weights))
    gates = np.tile(weights[:, :1], 4 * hidden)
    stored = {
        "W": np.zeros((1, depth, 4 * hidden), np.int8) if recurrent else gates[None],
        "R": gates[None] if recurrent else np.zeros((1, hidden, 4 * hidden), np.int8),
        "h": np.ones((1, 1, hidden), np.float32), "c": np.ones((1, 1, hidden), np.float32),
        **{name: np.array([1e-3], np.float32) for name in ("Ws", "Rs")},
        **{name: np.zeros(1, np.int8) for name in ("Wz", "Rz")},
    }  # fmt: skip
    names = ["x", "W", "R", "", "", "h", "c", "", "Ws", "Wz", "Rs", "Rz"]
    node = helper.make_node("DynamicQuantizeLSTM", names, ["y"], "lstm", domain=MS, hidden_size=hidden)
    return file_of([node], stored, [{"x": np.ones((1, 1, depth), np.float32)}])


def exact_convolution(weights: Weights) -> File:
    weight = np.ascontiguousarray(weights.T.reshape(8, 4, 4))
    return file_of(
        [helper.make_node("ConvInteger", ["x", "w"], ["y"], "c")], {"w": weight}, [{"x": full(1, 4, 5)}]
    )


def blockwise(weights: Weights) -> File:
    """Returns a product with 8-bit weights around 128, which quantizes its activations at run time."""
    stored = {
        "w": np.where(weights.T, 255, 128).astype(np.uint8).reshape(8, 1, 32), "s": np.full(8, 0.01, np.float32)
    }  # fmt: skip
    how: dict[str, Any] = {"K": 32, "N": 8, "bits": 8, "block_size": 32, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], "product", domain=MS, **how)
    return file_of([node], stored, [{"x": np.ones((2, 32), np.float32)}])


# The depth K of each case, and a function from weights [K, 8] to a file.
CASES: dict[str, tuple[int, Callable[[Weights], File]]] = {
    "QLinearConv, 1x1": (16, lambda w: convolution(w, 16, 1, 1)),
    "QLinearConv, 3 channels": (27, lambda w: convolution(w, 3, 3, 3)),
    "QLinearConv, 4 channels": (16, lambda w: convolution(w, 4, 2, 2)),
    "QLinearConv, 16 outputs (symmetric kernel)": (36, lambda w: convolution(np.tile(w, 2), 4, 3, 3)),
    "QLinearConv, groups of odd depth": (9, lambda w: convolution(np.hstack([0 * w, w]), 3, 3, group=2)),
    "QLinearConv, 1-D": (15, lambda w: convolution(w, 5, 3)),
    "QLinearConv, 3-D": (16, lambda w: convolution(w, 2, 2, 2, 2)),
    "QLinearMatMul": (19, lambda w: product(full(3, len(w)), w)),
    "QLinearMatMul, one row": (130, lambda w: product(full(1, len(w)), w)),
    "QLinearMatMul, stack": (18, lambda w: product(full(2, 3, len(w)), np.stack([w, w]))),
    "QGemm": (19, lambda w: gemm(full(3, len(w)), w)),
    "QGemm, transA and transB": (19, lambda w: gemm(full(len(w), 3), w.T.copy(), transA=1, transB=1)),
    "MatMulInteger": (19, lambda w: integers(full(3, len(w)), w)),
    "MatMulIntegerToFloat": (19, lambda w: to_float(np.ones((3, len(w)), np.float32), w)),
    "DynamicQuantizeMatMul": (19, dynamic),
    "QAttention": (18, attention),
    "DynamicQuantizeLSTM, W": (18, lambda w: lstm(w, recurrent=False)),
    "DynamicQuantizeLSTM, R": (8, lambda w: lstm(w, recurrent=True)),
    "ConvInteger": (16, exact_convolution),
    "MatMulNBits": (32, blockwise),
    "depthwise": (9, lambda w: conv(full(1, 8, 4, 4), w.T.reshape(8, 1, 3, 3).copy(), zero=0, group=8)),
}  # fmt: skip
EXACT = ("ConvInteger", "MatMulNBits", "depthwise")


def places(depth: int) -> list[tuple[int, int]]:
    """Returns pairs of indices along K: neighbours at both ends, within or across pairs, and some apart."""
    last = depth - 1 - depth % 2
    found = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 2), (0, 4), (1, 3), (last - 1, last), (last - 2, last - 1)]
    return sorted({*found, (depth - 2, depth - 1)})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    QEMU is None, reason="needs qemu-x86_64 (apt-get install qemu-user), for a CPU without VNNI"
)
@pytest.mark.skipif(saturates_here(), reason="the exact answers are this processor's, which saturates")
def test_which_weights_meet(tmp_path: Path) -> None:
    files: list[tuple[str, bool, Path, dict[str, Any]]] = []
    for name, (depth, made) in CASES.items():
        for i, j in places(depth):
            weights = np.zeros((depth, 8), np.int8)
            weights[[i, j]] = 127
            path, file = tmp_path / f"{len(files)}.onnx", made(weights)
            onnx.save(file.model, path)
            np.savez(tmp_path / f"{len(files)}.0.npz", allow_pickle=False, **file.batches[0])
            met = i // 2 == j // 2 and name not in EXACT
            files.append((f"{name}: weights {i} and {j}", met, path, file.batches[0]))
    assert QEMU is not None
    command = [QEMU, "-cpu", "Haswell", sys.executable, "-c", SCRIPT, str(tmp_path)]
    subprocess.run(command, check=True, timeout=800, capture_output=True)
    wrong = []
    for name, met, path, batch in files:
        exact = open_session(path, threads=1).run(None, batch)[0].astype(float)
        with np.load(path.with_name(f"{path.stem}.0.out.npz")) as found:
            moved = float(np.abs(found["arr_0"].astype(float) - exact).max())
        if met != (moved > 1e-3):  # float kernels differ a little between AVX2 and AVX-512
            wrong.append((name, met, moved))
    assert not wrong
