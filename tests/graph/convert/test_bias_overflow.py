"""Checks that tiny weights and a huge bias in one channel are both kept, for torch and ONNX models."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from chain import calibrated, run_ort, run_torch, ship
from planted_biases import CHANNEL, HUGE, OPERATORS, largest_errors, planted

from qatkit import QATModule
from qatkit.graph.convert.integer_modules import Quantized
from qatkit.graph.convert.to_integers import convert
from qatkit.graph.quantizers import quantized_operators
from qatkit.importing import import_onnx
from qatkit.importing.write_back import write_back
from qatkit.quant.backends import FBGEMM, Backend
from qatkit.quant.granularity import PerChannel, PerTensor

SCALES = {"per_channel": PerChannel(0), "per_tensor": PerTensor()}


def backend(scales: str, dtype: str, scale_type: str = "float") -> Backend:
    weight = replace(FBGEMM.weight, granularity=SCALES[scales], bias_dtype=dtype, scale_type=scale_type)
    return replace(FBGEMM, weight=weight, activation=replace(FBGEMM.activation, scale_type=scale_type))


def by_channel(found: np.ndarray) -> np.ndarray:
    others = tuple(axis for axis in range(found.ndim) if axis != 1)
    return np.asarray(np.abs(found).max(axis=others))


@pytest.mark.parametrize(
    ("name", "dtype"), [*product(OPERATORS, ("int32", "int8")), ("linear", "int16"), ("linear", "float")]
)
@pytest.mark.parametrize("scales", SCALES)
def test_results_are_within_the_roundings_of_float(name: str, scales: str, dtype: str) -> None:
    model, images = planted(name, HUGE[scales])
    case = ship(model, images, f"overflow_{name}_{scales}_{dtype}", backend(scales, dtype))
    wanted = run_torch(model, images)
    bound = largest_errors(case.path, wanted.shape[1])
    for made in (
        run_torch(case.converted, images),
        *(run_ort(case.path, images, optimize=level) for level in (False, True)),
    ):
        assert (by_channel(made - wanted) <= bound).all()
    # The other channels lose no accuracy to the planted one, except where all biases share one scale.
    if dtype in ("int32", "float"):
        assert name == "linear" or bound[CHANNEL] < 0.6 * HUGE[scales] / 254
        assert name != "linear" or (
            bound[CHANNEL] < 2e-6 * HUGE[scales] and np.delete(bound, CHANNEL).max() < 0.2
        )
    assert any("fits int32; outputs change by at most" in why for _, why in case.conversion.skipped)


@pytest.mark.parametrize("dtype", ["int32", "int8"])
def test_raised_powers_of_two_stay_powers(dtype: str) -> None:
    model, images = planted("linear")
    case = ship(model, images, f"overflow_pow2_{dtype}", backend("per_channel", dtype, "pow2"))
    module = next(one for one in case.converted.modules() if isinstance(one, Quantized))
    assert (np.frexp(module.weight_scale.numpy())[0] == 0.5).all() and module.repaired == 1
    bound = largest_errors(case.path, 6)
    assert (by_channel(run_ort(case.path, images) - run_torch(model, images)) <= bound).all()


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_given_file_keeps_both(name: str, scales: str, tmp_path: Path) -> None:
    model, images = planted(name, HUGE[scales])
    source, target = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    torch.onnx.export(model, (images,), str(source), input_names=["input"], dynamo=False, opset_version=13)
    imported = import_onnx(source)
    module = QATModule(imported, {"input": images}, backend=backend(scales, "int32"))
    module.mixed_scales = "report"
    module.calibrate([{"input": images}])
    write_back(imported, module.convert().graph, target)
    wanted = run_ort(source, images)
    bound = largest_errors(target, wanted.shape[1])
    for level in (False, True):
        assert (by_channel(run_ort(target, images, optimize=level) - wanted) <= bound).all()


def test_learned_roundings_do_not_move_a_raised_channel() -> None:
    """An algorithm's integers fit one scale; where that scale is raised later, rounding is to nearest."""
    model, images = planted("linear")
    graph = calibrated(copy.deepcopy(model), images, backend("per_channel", "int32"))
    _, operator, fake = quantized_operators(graph)[0]
    weight = operator.weight.detach()
    scale = fake.scale(weight)
    fake.fix(scale, weight, torch.ceil(weight / scale[:, None]).clamp(-127, 127))
    module = next(one for one in convert(graph).graph.modules() if isinstance(one, Quantized))
    nearest = torch.round(weight[CHANNEL] / module.weight_scale[CHANNEL])
    assert torch.equal(module.weight[CHANNEL].float(), nearest)
