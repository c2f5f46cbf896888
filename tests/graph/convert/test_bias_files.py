"""Tests of exported files with biases of each type: what is stored, computed and reported."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from chain import Shipped, noise, run_ort, run_torch, ship
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from qatkit import QATModule
from qatkit.config.schema import OverrideConfig
from qatkit.quant.backends import FBGEMM, Backend
from qatkit.quant.granularity import PerTensor
from qatkit.quant.spec import BIAS_TYPES, NARROW_BIAS
from qatkit.verify.audit import audit

KINDS = {
    "int32": TensorProto.INT32,
    "int16": TensorProto.INT16,
    "int8": TensorProto.INT8,
    "float": TensorProto.FLOAT,
}


class Net(nn.Module):
    """A convolution, a depthwise and a transposed one, and Linears with 8-bit and with float results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.deep = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=16)
        self.up, self.fc1, self.fc2 = nn.ConvTranspose2d(16, 16, 2, 2), nn.Linear(16, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.up(torch.relu(self.deep(torch.relu(self.conv(x))))))
        return self.fc2(torch.relu(self.fc1(x.mean((2, 3)))))


def backend(dtype: str, **settings: Any) -> Backend:
    scales = {key: settings.pop(key) for key in ("scale_type",) if key in settings}
    weight = replace(FBGEMM.weight, bias_dtype=dtype, **settings, **scales)
    return replace(FBGEMM, weight=weight, activation=replace(FBGEMM.activation, **scales))


@functools.cache
def of(dtype: str, scale_type: str = "float", per_tensor: bool = False) -> Shipped:
    settings = {"granularity": PerTensor()} if per_tensor else {}
    given = backend(dtype, scale_type=scale_type, **settings)
    return ship(Net().eval(), noise(16, 3, 12, 12), f"bias_{dtype}_{scale_type}_{per_tensor}", given)


def biases(path: Path) -> Iterator[tuple[str, onnx.TensorProto, np.ndarray | None]]:
    """Yields the operator, the tensor and the scale of each bias; a float bias has the scale None."""
    graph = onnx.load(str(path)).graph
    constants = {one.name: one for one in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.input) > 2:
            pair = makers.get(node.input[2])
            held = constants[node.input[2] if pair is None else pair.input[0]]
            scale = None if pair is None else numpy_helper.to_array(constants[pair.input[1]])
            yield node.op_type, held, scale


@pytest.mark.parametrize(("scale_type", "per_tensor"), [("float", False), ("float", True), ("pow2", False)])
@pytest.mark.parametrize("dtype", BIAS_TYPES)
def test_the_file_has_the_type_and_equals_the_module(dtype: str, scale_type: str, per_tensor: bool) -> None:
    case = of(dtype, scale_type, per_tensor)
    found = list(biases(case.path))
    assert len(found) == 5 and {held.data_type for _, held, _ in found} == {KINDS[dtype]}
    for _, held, scale in found:
        assert (scale is None) == (dtype == "float")
        if scale is not None:
            assert scale.ndim == (not per_tensor)
            assert scale_type == "float" or (np.frexp(scale)[0] == 0.5).all()
            assert np.abs(numpy_helper.to_array(held)).max() > 0
    images = noise(64, 3, 12, 12, seed=5)
    wanted = run_torch(case.converted, images)
    tiny = 1e-6 * np.abs(wanted).max()
    for made in (
        run_torch(case.simulated, images),
        *(run_ort(case.path, images, optimize=level) for level in (False, True)),
    ):
        np.testing.assert_allclose(made, wanted, rtol=0, atol=tiny)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_the_audit_says_why_narrow_biases_are_float(dtype: str) -> None:
    found = audit(of(dtype).path)
    reasons = {node.reason for node in found.nodes if node.macs}
    assert reasons == {NARROW_BIAS} and not found.problems and found.int8_macs == 0


def test_float_biases_keep_the_kernels_of_8_bit_results() -> None:
    found = audit(of("float").path)
    kinds = [(node.op, node.precision) for node in found.nodes if node.macs]
    assert [op for op, precision in kinds if precision != "int8"] == ["Gemm"] and len(kinds) == 5
    assert len(found.problems) == 1 and "backend.bias_dtype=int32" in found.problems[0]
    module = QATModule(Net(), noise(2, 3, 12, 12), backend=backend("float"))
    assert module.left_float == ["fc1", "fc2"]
    assert not audit(of("float").path, allow_float=module.left_float).problems


def test_an_override_changes_one_operators_bias() -> None:
    overrides = {"fc1": OverrideConfig(bias_dtype="int8"), "conv": OverrideConfig(bias_dtype="float")}
    case = ship(Net().eval(), noise(16, 3, 12, 12), "bias_overrides", backend("int32"), overrides)
    kinds = [held.data_type for _, held, _ in biases(case.path)]
    assert kinds == [KINDS[name] for name in ("float", "int32", "int32", "int8", "int32")]
