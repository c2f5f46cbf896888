"""Tests of quantizing a float file with the fixed encodings of a quantized file from any tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from aimet_samples import SAMPLES, network
from chain import noise
from clean_nets import drawn, save
from onnx import numpy_helper
from onnx_models import Array
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from written import Written, outputs, write

from qatkit import QATModule
from qatkit.config.schema import OverrideConfig
from qatkit.graph.fixed_encodings import Matched, fix, matched
from qatkit.importing import import_onnx
from qatkit.importing.encodings import encodings_of
from qatkit.importing.tensor_names import names_of_file
from qatkit.importing.write_back import write_back
from qatkit.quant.backends import FBGEMM
from qatkit.records import aimet
from qatkit.records.encodings import Encoding, encodings_from
from qatkit_verify.errors import ConfigError

KEY = "calibration.encodings"
FEEDS = {"input": noise(4, 3, 8, 8)}
# A residual block with a BatchNormalization, a pool after a ReLU, a Concat, SiLU, HardSwish, and a MatMul
# whose weight is [inputs, outputs].
RESIDUAL = """<ir_version: 8, opset_import: ["" : 17]> net (float[n, 3, 8, 8] input) => (float[n, 10] out, float[n] s) {
  c1 = Conv <pads = [1, 1, 1, 1]> (input, w1)
  b1 = BatchNormalization (c1, one, zero, zero, one)
  r1 = Relu (b1)
  c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2)
  sum = Add (c2, r1)
  relu2 = Relu (sum)
  pooled = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (relu2)
  c3 = Conv (pooled, w3)
  sig = Sigmoid (c3)
  silu = Mul (c3, sig)
  gated = HardSwish (silu)
  both = Concat <axis = 1> (gated, pooled)
  mean = GlobalAveragePool (both)
  flat = Flatten (mean)
  out = MatMul (flat, w4)
  s = ReduceMean <axes = [1], keepdims = 0> (out)
}"""

# Replacement names that onnx's text syntax cannot express.
NAMES = {"b1": "b1:0", "r1": "r/1", "sum": "block.sum", "relu2": "/block/relu:0"}


def residual(path: Path) -> Path:
    constants = {"w1": drawn(8, 3, 3, 3), "w2": drawn(8, 8, 3, 3, seed=1), "w3": drawn(8, 8, 1, 1, seed=2)}
    norm = {"one": np.full(8, 1.5, np.float32), "zero": np.full(8, 0.1, np.float32)}
    source = save(path, RESIDUAL, {**constants, **norm, "w4": drawn(16, 10, seed=3)})
    model = onnx.load(source)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [NAMES.get(name, name) for name in names]
    onnx.save(model, source)
    return source


def again(source: Path, encodings: Mapping[str, Encoding], **settings: Any) -> tuple[Written, Matched]:
    """Quantizes the float file with fixed encodings and calibrates the rest on other images."""
    model = import_onnx(source)
    module = QATModule(model, FEEDS, **settings)
    module.mixed_scales = "report"
    found = matched(module.graph, names_of_file(model, module.graph), encodings, "encodings.json")
    fix(module.graph, found)
    module.calibrate([{"input": 3 * noise(4, 3, 8, 8, seed=9)}])
    converted = module.convert().graph
    target = source.with_name(f"{source.stem}_again.onnx")
    write_back(model, converted, target)
    return Written(target, model, converted, module), found


def constants(path: Path) -> dict[str, Array]:
    return {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("make", [network, residual])
def test_a_quantized_file_comes_back_bit_for_bit(make: Any, tmp_path: Path) -> None:
    """Encodings, weights, biases and outputs in ONNX Runtime must survive a round trip through JSON."""
    source = make(tmp_path / "net.onnx")
    first = write(source, FEEDS)
    listed = tmp_path / "encodings.json"
    listed.write_text(json.dumps(encodings_of(first.path).as_dict("net")))

    second, found = again(source, encodings_from(listed, KEY).all)

    assert found.unused.keys() <= {
        "gated_Add_Output",
        "gated_three",
    }  # constants inside the HardSwish
    before, after = constants(first.path), constants(second.path)
    assert before.keys() == after.keys()
    different = [name for name in before if not same_bits(before[name], after[name])]
    assert different == []
    for level in (False, True):
        pairs = zip(*(outputs(one.path, FEEDS, optimized=level) for one in (first, second)), strict=True)
        assert all(same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("version", aimet.VERSIONS)
def test_our_file_comes_back_through_aimets_form(version: str, tmp_path: Path) -> None:
    source = residual(tmp_path / "net.onnx")
    first = write(source, FEEDS)
    given = aimet.as_dict(encodings_of(first.path), version)

    second, _ = again(source, aimet.from_dict(json.loads(json.dumps(given))).all)

    before, after = constants(first.path), constants(second.path)
    assert [name for name in before if not same_bits(before[name], after[name])] == []


def test_half_of_the_encodings_leave_the_rest_to_calibration(tmp_path: Path) -> None:
    source = residual(tmp_path / "net.onnx")
    first = write(source, FEEDS)
    whole = encodings_of(first.path)
    given = {name: one for place, (name, one) in enumerate(whole.all.items()) if place % 2}

    second, found = again(source, given)

    after = encodings_of(second.path)
    held = {name for name, _ in (*found.activations.values(), *found.weights.values())}
    assert 4 <= len(held) < len(whole.all)
    assert all(after.all[name].equals(given[name]) for name in held)
    others = [name for name in whole.activations if name not in given]
    changed = [name for name in others if not after.activations[name].equals(whole.activations[name])]
    assert "input" in changed  # calibrated on values three times as large


def quantized_by_ort(source: Path) -> Path:
    """Quantizes a file per channel with onnxruntime.quantization.quantize_static."""

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows = iter({"input": row[None].numpy()} for row in FEEDS["input"])

        def get_next(self) -> dict[str, Array] | None:
            return next(self.rows, None)

    target = source.with_name("ort.onnx")
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(str(source), str(target), Reader(), per_channel=True, **kinds)
    return target


def test_quantize_statics_numbers_are_taken_over(tmp_path: Path) -> None:
    source = network(tmp_path / "net.onnx")
    theirs = quantized_by_ort(source)
    listed = encodings_of(theirs)

    ours, found = again(source, listed.all, backend=FBGEMM.reduced(False))

    assert {name for name, _ in found.weights.values()} == {"first.weight", "second.weight", "fc.weight"}
    assert {name for name, _ in found.activations.values()} >= {"input", "features/relu:0"}
    after = encodings_of(ours.path)
    for name, _ in (*found.activations.values(), *found.weights.values()):
        assert after.all[name].equals(listed.all[name]), name
    before, now = constants(theirs), constants(ours.path)
    for name in ("first.weight", "second.weight", "fc.weight"):
        assert same_bits(before[f"{name}_quantized"], now[f"{name}_quantized"])
    assert same_bits(before["first.bias_quantized"], now["first.bias_quantized"])


@pytest.mark.parametrize("version", aimet.VERSIONS)
def test_aimets_own_encodings_are_taken_over(version: str, tmp_path: Path) -> None:
    """AIMET's scales are kept, but its integer weights start at -128 and qatkit's at -127."""
    source = network(tmp_path / "net.onnx")
    listed = encodings_from(SAMPLES / f"per_channel.{version}.json", KEY)

    ours, found = again(source, listed.all, backend=FBGEMM.reduced(False))

    after = encodings_of(ours.path)
    assert {name for name, _ in found.weights.values()} == {"first.weight", "second.weight", "fc.weight"}
    for name, _ in (*found.activations.values(), *found.weights.values()):
        assert after.all[name].equals(listed.all[name]), name
    held = constants(source)
    for name in ("first.weight", "second.weight", "fc.weight"):
        scale = listed.all[name].scale
        steps = np.rint(held[name] / scale.reshape(-1, *[1] * (held[name].ndim - 1)))
        assert np.array_equal(constants(ours.path)[f"{name}_quantized"], np.clip(steps, -127, 127))


def one(dtype: str = "uint8", zero: int = 0, scale: Any = 0.05) -> Encoding:
    scales = np.asarray(scale, np.float32)
    return Encoding(dtype, scales, np.full(scales.shape, zero, np.int64))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"nothing": one(), "else": one()},
            "the model has none of the tensors that the file names, such as 'nothing' (known: ",
        ),
        (
            {"input": one(), "features/relu:1": one()},
            "the model has no tensor 'features/relu:1' (did you mean features/relu:0",
        ),
        (
            {"input": one("uint16"), "features/relu:0": one("uint16")},
            "2 encodings do not fit the backend ('input' needs activation_dtype:uint16); set "
            "backend.activation_dtype=uint16",
        ),
        (
            {"first.weight": one("int8"), "second.weight": one("int4", 0, [0.1] * 32)},
            "set '+backend.overrides={first:{weight_granularity:per_tensor},features/second:{weight_dtype:int4}}'",
        ),
        (
            {"first.weight": one("int8", 5, [0.1] * 8), "fc.weight": one("uint8", 100, [0.1] * 10)},
            "needs weight_symmetric:false); set backend.weight_symmetric=false",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_way_out(
    given: dict[str, Encoding], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        again(network(tmp_path / "net.onnx"), given)
    assert str(caught.value).startswith("calibration.encodings=encodings.json: ")
    assert told in str(caught.value)


def test_an_override_lets_another_type_in(tmp_path: Path) -> None:
    source = network(tmp_path / "net.onnx")
    weight = one("int4", 0, [0.1] * 32)
    overrides = {"features/second": OverrideConfig(weight_dtype="int4")}
    written, _ = again(source, {"second.weight": weight}, overrides=overrides)
    held = constants(written.path)
    assert same_bits(held["second.weight_scale"], weight.scale)
    assert np.abs(held["second.weight_quantized"]).max() <= 7


def test_a_type_of_the_other_sign_is_counted_anew(tmp_path: Path) -> None:
    """int8 and uint8 have the same steps, with zero points that differ by 128."""
    source = network(tmp_path / "net.onnx")
    given = {"input": one("int8", -8), "first.weight": one("uint8", 128, [0.01] * 8)}
    written, _ = again(source, given)
    after = encodings_of(written.path)
    assert after.activations["input"].equals(one("uint8", 120))
    assert after.parameters["first.weight"].equals(one("int8", 0, [0.01] * 8))


def test_what_is_not_used_is_said(tmp_path: Path) -> None:
    given = {
        "features/first:0": one("uint8", 100),  # before the ReLU
        "features/relu:0": one(),
        "output": one(),
        "somewhere": one(),
        "first.bias": Encoding("int32", np.ones(8, np.float32), np.zeros(8, np.int64)),
    }
    _, found = again(network(tmp_path / "net.onnx"), given)
    assert found.unused == {
        "features/first:0": "the tensor has the range of 'features/relu:0'",
        "output": "the tensor has no quantizer",
        "somewhere": "the model has no such tensor",
    }
    assert found.notes("e.json")[0] == (
        "encodings: e.json sets the scales of 1 activation and 0 weights; the scales of biases follow from these"
    )


def test_an_encoding_before_a_relu_does_not_undo_it(tmp_path: Path) -> None:
    given = {"features/first:0": one("uint8", 100), "input": one()}
    written, found = again(network(tmp_path / "net.onnx"), given)
    assert found.unused == {
        "features/first:0": "the range has to start at zero like that of the ReLU after it"
    }
    assert encodings_of(written.path).activations["features/relu:0"].zero_point == 0


def test_fixed_scales_survive_a_state_dict(tmp_path: Path) -> None:
    """A resumed run restores fixed scales from the state_dict."""
    source = network(tmp_path / "net.onnx")
    written, _ = again(source, {"input": one("uint8", 100, 0.03)})
    other = QATModule(written.model, FEEDS)
    other.load_state_dict(written.module.state_dict())
    other.calibrate([{"input": torch.ones(2, 3, 8, 8)}])
    target = tmp_path / "other.onnx"
    write_back(written.model, other.convert().graph, target)
    assert encodings_of(target).activations["input"].equals(one("uint8", 100, 0.03))
