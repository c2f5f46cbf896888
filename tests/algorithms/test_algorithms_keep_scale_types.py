"""Checks that GPTQ and AdaRound keep the scale type.

Their squared output error must be below 0.9 times that of rounding to nearest with int4, and 1.02 times with int8.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from chain import calibrated, noise, run_torch
from torch import nn

from qatkit.algorithms import GPTQ, AdaRound
from qatkit.algorithms.base import Algorithm
from qatkit.graph.convert.integer_modules import Quantized
from qatkit.graph.convert.to_integers import convert
from qatkit.quant.backends import FBGEMM
from qatkit.quant.scale_types import nearest
from qatkit.quant.spec import QuantSpec

ALGORITHMS = {"gptq": GPTQ(), "adaround": AdaRound(steps=100)}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10)
    ).eval()


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        ("pow2", "gptq", "int8"),
        ("pow2", "gptq", "int4"),
        ("pow2", "adaround", "int4"),
        ("int16", "gptq", "int4"),
    ],
)
def test_scales_stay_of_their_type_and_nothing_is_lost(kind: str, name: str, dtype: str) -> None:
    algorithm: Algorithm = ALGORITHMS[name]
    weight = replace(FBGEMM.weight, dtype=dtype, scale_type=kind)
    backend = replace(FBGEMM, weight=weight, activation=replace(FBGEMM.activation, scale_type=kind))
    images, model = noise(64, 3, 8, 8), net()
    graph = calibrated(copy.deepcopy(model), images, backend)
    wanted, plain = run_torch(model, images), run_torch(convert(graph).graph, images)
    algorithm(graph, [images])
    converted = convert(graph).graph
    found = [one for one in converted.modules() if isinstance(one, Quantized)]
    assert len(found) == 3
    for one in found:
        assert torch.equal(nearest(one.weight_scale, QuantSpec("int8", scale_type=kind)), one.weight_scale)
    errors = [float(np.square(made - wanted).mean()) for made in (run_torch(converted, images), plain)]
    assert errors[0] < (1.02 if dtype == "int8" else 0.9) * errors[1]
