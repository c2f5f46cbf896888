"""Tests of weights and activations of 4 bits or fewer: the file has the module's integers and outputs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import pytest
import torch
from chain import GatedSum, calibrated, noise, reach, run_ort, run_torch
from torch import Tensor

from qatkit.config.rules import validate
from qatkit.config.schema import Config, OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.integer_modules import Quantized, QuantizeDequantize
from qatkit.graph.convert.to_integers import convert
from qatkit.quant.backends import FBGEMM
from qatkit.run.backend import backend_of
from qatkit_verify.errors import ConfigError

INT4 = OverrideConfig(weight_dtype="int4")
UINT4 = OverrideConfig(weight_dtype="int4", activation_dtype="uint4")


def test_four_bits_are_computed_alike_everywhere(tmp_path: Path) -> None:
    graph = calibrated(GatedSum().eval(), noise(32, 3, 10, 10), overrides={"*": UINT4})
    converted = convert(graph).graph
    images, seen = noise(32, 3, 10, 10, seed=4), list[int]()

    def count(module: QuantizeDequantize, _: object, y: Tensor) -> None:
        if module.ends is not None:
            seen.append(len(torch.round(y / module.scale).unique()))

    handles = [
        m.register_forward_hook(count) for m in converted.modules() if isinstance(m, QuantizeDequantize)
    ]
    expected = run_torch(converted, images)
    for handle in handles:
        handle.remove()
    assert len(seen) >= 5 and max(seen) <= 16 and max(seen) > 10
    export_onnx(converted, images[:2], tmp_path / "model.onnx")
    tolerance = 2e-6 * np.abs(expected).max()
    np.testing.assert_allclose(run_torch(graph, images), expected, rtol=0, atol=tolerance)
    for optimize in (False, True):
        got = run_ort(tmp_path / "model.onnx", images, optimize=optimize)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "largest"), [("int4", 7), ("int3", 3), ("int2", 1)])
def test_packed_weights_are_the_modules_integers(tmp_path: Path, dtype: str, largest: int) -> None:
    overrides = {"*": OverrideConfig(weight_dtype=dtype), "stem": OverrideConfig(weight_dtype="int8")}
    converted = convert(calibrated(GatedSum().eval(), noise(32, 3, 10, 10), overrides=overrides)).graph
    images = noise(16, 3, 10, 10, seed=4)
    for name, packed in (("bytes", False), ("packed", True)):
        export_onnx(converted, images[:2], tmp_path / f"{name}.onnx", opset=21, pack_int4=packed)
    held = {t.name: t for t in onnx.load(tmp_path / "packed.onnx").graph.initializer}
    weights = {path: m for path, m in converted.named_modules() if isinstance(m, Quantized)}
    types = {path: held[f"{path}.weight"].data_type for path in weights}
    assert types == {
        path: onnx.TensorProto.INT8 if path == "stem" else onnx.TensorProto.INT4 for path in weights
    }
    for path, module in weights.items():
        if path == "stem":
            assert int(reach(module.weight).max()) in (126, 127, 128)
        else:
            assert module.weight.abs().max() == largest
        array = onnx.numpy_helper.to_array(held[f"{path}.weight"]).astype(np.int8)
        np.testing.assert_array_equal(array, module.weight.numpy())
    assert (tmp_path / "packed.onnx").stat().st_size < (tmp_path / "bytes.onnx").stat().st_size
    for name, optimize in itertools.product(("bytes", "packed"), (False, True)):
        np.testing.assert_allclose(
            run_ort(tmp_path / f"{name}.onnx", images, optimize=optimize),
            run_torch(converted, images),
            atol=5e-6,
        )


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 63), ("int4", 7), ("int3", 3), ("int2", 1)])
def test_few_bits_keep_them_on_cpus_that_saturate(dtype: str, largest: int) -> None:
    override = {"*": OverrideConfig(weight_dtype=dtype)}
    graph = calibrated(GatedSum().eval(), noise(32, 3, 10, 10), FBGEMM.reduced(True), overrides=override)
    weights = [m.weight for m in convert(graph).graph.modules() if isinstance(m, Quantized)]
    assert weights
    assert {int(weight.abs().max()) for weight in weights} == {largest}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opset": 20}, "export.opset=20: expected 21 to 23 with export.pack_int4=true"),
        ({"audit": True}, "verify.audit=true: expected false with export.pack_int4=true"),
        (
            {"audit": True, "override": UINT4},
            "verify.audit=true: expected false with backend.overrides.conv.activation_dtype",
        ),
    ],
)
def test_what_no_kernel_computes_is_said_before_anything_long(
    changes: dict[str, object], message: str
) -> None:
    config = Config()
    config.export.pack_int4, config.export.opset = True, cast(int, changes.get("opset", 21))
    config.backend.overrides = {"conv": cast(OverrideConfig, changes.get("override", INT4))}
    config.verify.audit = bool(changes.get("audit", False))
    with pytest.raises(ConfigError) as refused:
        validate(config)
    assert str(refused.value).startswith(message)


def test_there_must_be_weights_to_pack() -> None:
    config = Config()
    config.export.pack_int4, config.export.opset = True, 21
    with pytest.raises(ConfigError) as refused:
        backend_of(config)
    message = "export.pack_int4=true: expected false without weights of int4, int3, int2, uint4"
    assert str(refused.value).startswith(message)
    config.backend.overrides = {"conv": OverrideConfig(weight_dtype="int3")}
    assert backend_of(config).name == "fbgemm"
