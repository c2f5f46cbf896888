"""Tests of number formats, such as mxfp4, in ONNX files: their functions equal the simulation bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from chain import ConvFlattenLinear, noise, run_ort, run_torch, ship, small_vit
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from qatkit.config.schema import OverrideConfig
from qatkit.export.format_functions import format_function
from qatkit.graph.quantizers import fake_quantizers, quantized_operators
from qatkit.quant.backends import SIMULATED, Backend
from qatkit.quant.formats.blocks import largest_finite, quantized, tensor_scale
from qatkit.quant.formats.table import FORMATS
from qatkit.quant.granularity import AlongAxis

LEVELS = ort.GraphOptimizationLevel


def file_of(name: str, axis: int, rank: int, opset: int) -> onnx.ModelProto:
    """Returns a model that calls a format's function once."""
    form = FORMATS[name]
    given = ["x", "s"] if form.has_tensor_scale else ["x"]
    settings: dict[str, Any] = {"axis": axis} if form.block else {}
    call = helper.make_node(name, given, ["y"], domain="qatkit", **settings)
    shape = [f"d{i}" for i in range(rank)]
    infos = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, [] if n == "s" else shape) for n in "xsy"}
    graph = helper.make_graph([call], "one", [infos[n] for n in given], [infos["y"]])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("qatkit", 1)]
    model = helper.make_model(
        graph, functions=[format_function(name, opset)], opset_imports=opsets, ir_version=8
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def values(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Returns random bits, tiny numbers, ties, ordinary numbers, zeros of both signs and infinities."""
    draw = np.random.default_rng(seed)
    kinds = [
        draw.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32),
        draw.standard_normal(shape) * np.exp2(draw.integers(-149, -118, shape)),
        draw.integers(-64, 65, shape) / 8 * np.exp2(draw.integers(-3, 3, shape)),
        draw.standard_normal(shape) * np.exp2(draw.integers(-6, 6, shape)),
    ]
    x = np.concatenate([np.asarray(one, np.float32) for one in kinds])
    x[-1] = 0
    x[-1, ::2] = -0.0
    x.flat[[3, 40]] = [np.inf, -np.inf]
    return x


def bits(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    found: NDArray[np.uint32] = (
        np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32).view(np.uint32)
    )
    return found


def evaluated(model: onnx.ModelProto, given: dict[str, Any]) -> NDArray[np.float32]:
    """Returns the output in onnx's reference evaluator, without its warnings about the signs of zeros."""
    with np.errstate(all="ignore"):
        outputs: Any = ReferenceEvaluator(model).run(None, given)
    found: NDArray[np.float32] = outputs[0]
    return found


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("name", FORMATS)
def test_functions_equal_the_simulation_bit_for_bit(name: str, opset: int) -> None:
    form = FORMATS[name]
    for shape, axis in (((4, 37), -1), ((2, 40, 3, 2), 1)):
        x = values(shape, opset)
        scale = tensor_scale(largest_finite(torch.from_numpy(x)), form)
        expected = quantized(torch.from_numpy(x), form, form.granularity(axis), scale)[0].numpy()
        model = file_of(name, axis, len(shape), opset)
        given = {"x": x} | ({"s": scale.numpy()} if form.has_tensor_scale else {})
        for level in (LEVELS.ORT_DISABLE_ALL, LEVELS.ORT_ENABLE_ALL):
            options = ort.SessionOptions()
            options.graph_optimization_level, options.log_severity_level = level, 3
            session = ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            np.testing.assert_array_equal(bits(session.run(None, given)[0]), bits(expected))
        if opset == 13:
            np.testing.assert_array_equal(bits(evaluated(model, given)), bits(expected))


def of(name: str, weight: str | None = None) -> Backend:
    return replace(
        SIMULATED,
        activation=replace(SIMULATED.activation, dtype=name),
        weight=replace(SIMULATED.weight, dtype=weight or name),
    )


@pytest.mark.parametrize(
    "name", ["nvfp4", *(pytest.param(one, marks=pytest.mark.slow) for one in FORMATS if one != "nvfp4")]
)
def test_a_whole_file_computes_what_was_simulated(name: str) -> None:
    shipped = ship(small_vit(), noise(8, 3, 32, 32), f"vit_{name}", of(name))
    simulated = run_torch(shipped.simulated, shipped.images)
    np.testing.assert_array_equal(run_torch(shipped.converted, shipped.images), simulated)
    # Sums in another order cross some of float16's rounding boundaries, each a step of 2^-10 of the logits.
    atol = 2e-3 if name == "float16" else 1e-5
    for optimize in (True, False):
        found = run_ort(shipped.path, shipped.images, optimize=optimize)
        np.testing.assert_allclose(found, simulated, atol=atol)
    assert [function.name for function in onnx.load(shipped.path).functions] == [name]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_a_pair_from_opset_19_on(name: str) -> None:
    shipped = ship(ConvFlattenLinear(), noise(4, 3, 8, 8), f"pair_{name}", of(name), opset=19)
    model = onnx.load(shipped.path)
    pairs = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert not model.functions
    assert len(pairs) == 2 * len(fake_quantizers(shipped.simulated))
    images = shipped.images * torch.tensor([1.0, 30.0, 1e-4, -1.0])[:, None, None, None]
    expected = run_torch(shipped.converted, images)
    for optimize in (True, False):
        found = run_ort(shipped.path, images, optimize=optimize)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    zeros = {one.name: one.data_type for one in model.graph.initializer}
    kind = getattr(TensorProto, name.upper().replace("FLOAT8_", "FLOAT8"))
    assert {zeros[node.input[2]] for node in pairs} == {kind}


def test_onnx_computes_the_same_file() -> None:
    shipped = ship(ConvFlattenLinear(), noise(4, 3, 8, 8), "reference", of("mxfp8_e4m3", "mxfp4"))
    found = evaluated(onnx.load(shipped.path), {"input": shipped.images.numpy()})
    np.testing.assert_allclose(found, run_torch(shipped.converted, shipped.images), atol=1e-5)


def test_blocks_lie_along_the_sums_of_each_operator() -> None:
    shipped = ship(ConvFlattenLinear(), noise(4, 3, 8, 8), "axes", of("bfp16", "mxfp4"))
    activations = [one.spec.granularity for one in fake_quantizers(shipped.simulated).values()]
    weights = [fake.spec.granularity for _, _, fake in quantized_operators(shipped.simulated)]
    assert activations[0] == AlongAxis(8, 1)
    assert activations[-1] == AlongAxis(8, -1)
    assert weights == [AlongAxis(32, 1)] * len(weights)


def test_a_tensor_on_its_way_to_a_linear_is_rounded_once() -> None:
    class Flattened(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3 * 8 * 8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(x.flatten(1))
            return found

    shipped = ship(Flattened(), noise(4, 3, 8, 8), "flat", of("mxfp4"))
    assert [one.spec.granularity for one in fake_quantizers(shipped.simulated).values()] == [
        AlongAxis(32, -1)
    ]


def test_an_override_has_a_format_of_its_own() -> None:
    overrides = {"op/linear": OverrideConfig(weight_dtype="mxint8"), "op/conv": OverrideConfig(float=True)}
    shipped = ship(ConvFlattenLinear(), noise(4, 3, 8, 8), "own", of("mxfp4"), overrides)
    assert [fake.spec.dtype for _, _, fake in quantized_operators(shipped.simulated)] == ["mxint8"]


def test_the_weights_of_the_model_stay_as_they_were() -> None:
    model = ConvFlattenLinear()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    ship(model, noise(2, 3, 8, 8), "kept", of("mxfp4"))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
