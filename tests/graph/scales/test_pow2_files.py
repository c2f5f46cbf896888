"""Checks that all scales of a file are powers of two, and that all implementations give the same result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from chain import SMALL, Shipped, build, noise, run_ort, run_torch, settle, ship
from onnx import numpy_helper

from qatkit.graph.quantizers import quantized_operators
from qatkit.quant.backends import FBGEMM, TENSORRT, Backend


def by_shifts(backend: Backend, **weight: Any) -> Backend:
    activation, given = (replace(one, scale_type="pow2") for one in (backend.activation, backend.weight))
    return replace(backend, activation=activation, weight=replace(given, **weight))


def of(name: str, backend: Backend) -> Shipped:
    if name not in SMALL:
        size = 64 if "mobilenet" in name else 32
        return ship(build(name, size), noise(8, 3, size, size), f"{name}_pow2", backend)
    kind, shape = SMALL[name]
    torch.manual_seed(0)
    return ship(settle(kind(), *shape), noise(16, *shape), f"{name}_pow2", backend)


def scales_of(path: str) -> Iterator[float]:
    model = onnx.load(path)
    constants = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    constants |= {
        n.output[0]: numpy_helper.to_array(n.attribute[0].t)
        for n in model.graph.node
        if n.op_type == "Constant"
    }
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            yield from constants[node.input[1]].reshape(-1).tolist()


@pytest.mark.parametrize(
    "name",
    [
        "residual",
        "concat",
        "gate",
        "hard_gate",
        "gated",
        "mlp",
        pytest.param("resnet18", marks=pytest.mark.slow),
    ],
)
def test_file_and_module_agree_and_all_scales_are_powers(name: str) -> None:
    case = of(name, by_shifts(FBGEMM, pairs=True))
    scales = list(scales_of(str(case.path)))
    assert scales and all(np.frexp(scale)[0] == 0.5 for scale in scales)
    images = noise(32, *case.images.shape[1:], seed=10)
    converted = run_torch(case.converted, images)
    made = [run_ort(case.path, images, optimize=optimize) for optimize in (False, True)]
    for found in (run_torch(case.simulated, images), *made):
        np.testing.assert_allclose(found, converted, rtol=0, atol=2e-6 * np.abs(converted).max())


def test_symmetric_activations_have_powers_too() -> None:
    case = of("gate", by_shifts(TENSORRT))
    assert all(np.frexp(scale)[0] == 0.5 for scale in scales_of(str(case.path)))


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weights_exponents_have_the_least_error(symmetric: bool) -> None:
    """No exponent from -20 to 4 has a smaller squared error in NumPy, at the zero_point of the weight."""
    case = of("residual", by_shifts(FBGEMM, symmetric=symmetric, pairs=False))
    for _, operator, fake in quantized_operators(case.simulated):
        weight = operator.weight.detach()
        found, zero = fake.scale(weight).numpy(), fake.zero_point(weight).numpy()
        rows = weight.flatten(1).double().numpy()
        low = -127 if symmetric else -128
        errors = []
        for exponent in range(-20, 5):
            steps = np.clip(np.round(rows / 2.0**exponent), low - zero[:, None], 127 - zero[:, None])
            errors.append(((steps * 2.0**exponent - rows) ** 2).sum(1))
        chosen = np.log2(found).astype(int) + 20
        at = np.arange(len(rows))
        np.testing.assert_allclose(np.array(errors)[chosen, at], np.min(errors, 0), rtol=1e-4)
