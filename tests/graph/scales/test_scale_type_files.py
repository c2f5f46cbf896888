"""Tests of files whose scales are all float16, or all integers times powers of two, against their modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from chain import SMALL, Shipped, noise, run_ort, run_torch, settle, ship, steps_off
from onnx import TensorProto, numpy_helper

from qatkit.config.schema import OverrideConfig
from qatkit.quant.backends import FBGEMM, Backend

KINDS = ("float16", "int16")


def is_of(kind: str, scale: np.ndarray) -> bool:
    """Returns whether scales are all float16, 15-bit integers times powers of two, or powers of two."""
    if kind == "float16":
        return bool((scale.astype(np.float16).astype(np.float64) == scale).all())
    whole = np.frexp(scale.astype(np.float64))[0] * 2 ** (15 if kind == "int16" else 1)
    return bool((whole == np.round(whole)).all())


def scales_of(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each quantized tensor and its scales, except int32 biases, whose scales are products."""
    graph = onnx.load(str(path)).graph
    constants = {one.name: one for one in graph.initializer}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            held = constants.get(node.input[0])
            if held is None or held.data_type != TensorProto.INT32:
                yield node.input[0], numpy_helper.to_array(constants[node.input[1]]).reshape(-1)


def of(name: str, kind: str, overrides: dict[str, OverrideConfig] | None = None, **given: Any) -> Shipped:
    backend: Backend = FBGEMM
    if overrides is None:
        activation, weight = (replace(one, scale_type=kind) for one in (backend.activation, backend.weight))
        backend = replace(backend, activation=activation, weight=replace(weight, **given))
    made, shape = SMALL[name]
    torch.manual_seed(0)
    return ship(settle(made(), *shape), noise(16, *shape), f"{name}_{kind}_{len(given)}", backend, overrides)


@pytest.mark.parametrize("name", ["residual", "hard_gate", "mlp"])
@pytest.mark.parametrize("kind", KINDS)
def test_file_and_module_agree_and_scales_are_of_the_type(name: str, kind: str) -> None:
    case = of(name, kind)
    found = list(scales_of(case.path))
    assert len(found) > 3 and all(is_of(kind, scale) for _, scale in found)
    images = noise(32, *case.images.shape[1:], seed=10)
    converted = run_torch(case.converted, images)
    for made in (
        run_torch(case.simulated, images),
        *(run_ort(case.path, images, optimize=optimize) for optimize in (False, True)),
    ):
        # Without alignment, a sum may be so near to a tie that float32 rounding moves a value by one step.
        off = np.abs(made - converted) > 2e-6 * np.abs(converted).max()
        assert off.mean() < 5e-4 and steps_off(converted, made) < 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_results_are_as_near_to_float_as_without(kind: str) -> None:
    images = noise(64, *SMALL["residual"][1], seed=11)
    errors = []
    for case in (of("residual", kind), of("residual", "float")):
        wanted = run_torch(case.model, images)
        errors.append(float(np.square(run_ort(case.path, images) - wanted).mean()))
    assert errors[0] < 1.3 * errors[1]


@pytest.mark.parametrize("kind", ["pow2", *KINDS])
def test_an_override_has_scales_of_its_own_type(kind: str) -> None:
    case = of("residual", kind, {"conv1": OverrideConfig(scale_type=kind)})
    weights = {name: scale for name, scale in scales_of(case.path) if "conv" in name and "weight" in name}
    assert {name for name, scale in weights.items() if is_of(kind, scale)} == {
        n for n in weights if "conv1" in n
    }
    assert len(weights) == 2
