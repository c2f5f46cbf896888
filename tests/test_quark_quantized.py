"""Tests of the rows of docs/quark.md whose keys quantize a file.

Each row is run once and checked against the types, scales and QuantizeLinear/DequantizeLinear pairs of the
file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from clean_nets import drawn, kinds, run
from command_line import Launch
from onnx import TensorProto
from quark_commands import Quark, commands
from quark_rows import activated, attention, before, behind, initializers, mixed, nodes, pair_of, plain, runs

_PAIR = {"DequantizeLinear"}
_QUANTIZE = "QuantizeLinear"


@pytest.fixture
def quark(request: pytest.FixtureRequest, launch: Launch, tmp_path: Path) -> Iterator[Quark]:
    yield from commands(request, launch, tmp_path)


@runs("OpTypesToQuantize", "NodesToQuantize", "exclude", "InputNodes", "OutputNodes", "RemoveFusedQDQ")
def test_types_and_names_choose_what_is_quantized(quark: Quark, tmp_path: Path) -> None:
    source = plain(tmp_path)
    convs = quark.static(source, "backend.only=[op/Conv]")
    assert before(convs, "Conv") == _PAIR and before(convs, "Gemm") != _PAIR
    one = quark.static(source, "backend.only=[/net/c2]")
    assert [before_node(one, name) for name in ("/net/c1", "/net/c2")] == [False, True]
    rest = quark.static(source, "backend.exclude=[/net/c1]")
    assert [before_node(rest, name) for name in ("/net/c1", "/net/c2")] == [False, True]


def before_node(model: onnx.ModelProto, name: str) -> bool:
    """Returns whether the first input of a node is dequantized."""
    made = {output: node.op_type for node in model.graph.node for output in node.output}
    (found,) = [node for node in model.graph.node if node.name == name]
    return made.get(found.input[0]) == "DequantizeLinear"


@runs("ExtraOpTypesToQuantize", "QuantizeAllOpTypes", "ForceQuantizeNoInputCheck", "RemoveQDQMulAdd")
def test_every_operator_is_quantized(quark: Quark, tmp_path: Path) -> None:
    source = mixed(tmp_path)
    few, every = quark.static(source), quark.static(source, "backend.every_operator=true")
    assert before(few, "MaxPool") == {"Relu"} and before(every, "MaxPool") == _PAIR
    assert before(every, "Concat") == before(every, "InstanceNormalization") == _PAIR
    assert kinds(every).count(_QUANTIZE) > kinds(few).count(_QUANTIZE)
    dropped = quark.cleaned(quark.file, "mode=clean", "clean.fold=none", "clean.drop_pairs=[Mul:Add]")
    assert kinds(dropped).count(_QUANTIZE) == kinds(every).count(_QUANTIZE) - 1


@runs("MatMulConstBOnly")
def test_products_of_activations_stay_float(quark: Quark, tmp_path: Path) -> None:
    model = quark.static(attention(tmp_path))
    held = {before(model, "MatMul", place) == _PAIR for place in (0, 1)}
    # Only the model's input and that of the last product are quantized.
    assert held == {False} and kinds(model).count(_QUANTIZE) == 2
    every = quark.static(attention(tmp_path), "backend.every_operator=true")
    assert before(every, "MatMul", 0) == before(every, "MatMul", 1) == _PAIR


@runs("specific_layer_config", "layer_type_config", "MixedPrecisionTensor", "SpecificTensorPrecision",
      "QDQOpTypePerChannelSupportToAxis", "TensorQuantOverrides")  # fmt: skip
def test_overrides_set_types_axes_and_scales(quark: Quark, tmp_path: Path) -> None:
    settings = (
        "{tensor/x:{activation_dtype:uint16},/net/c2:{weight_axis:0,reduce_range:true},"
        "tensor/r1:{activation_scale:0.05,activation_zero_point:0}}"
    )
    model = quark.static(
        plain(tmp_path), f"+backend.overrides={settings}", "backend.weight_granularity=per_tensor"
    )
    first, second = nodes(model, "Conv")
    (gemm,) = nodes(model, "Gemm")
    assert [pair_of(model, node, 0)[2].dtype for node in (first, gemm)] == [np.uint16, np.uint8]
    weight, scale, _ = pair_of(model, second, 1)
    assert scale.shape == (8,) and np.abs(weight).max() <= 64  # one bit fewer
    assert pair_of(model, first, 1)[1].size == 1
    assert pair_of(model, second, 0)[1:] == (np.float32(0.05), 0)


@runs("AddQDQPairToWeight", "DedicatedQDQPair", "DedicateDQNode", "FoldRelu")
def test_pairs_of_a_file_take_another_form(quark: Quark, tmp_path: Path) -> None:
    source = mixed(tmp_path)
    before_it = quark.static(source)
    file, names = quark.file, "[weight_pairs,dedicated_pairs,fold_relu]"
    model = quark.cleaned(file, "mode=clean", "clean.fold=none", f"clean.rewrite={names}")
    (conv, *_) = nodes(model, "Conv")
    made = {output: node for node in model.graph.node for output in node.output}
    weight = made[made[conv.input[1]].input[0]]
    assert weight.op_type == _QUANTIZE and initializers(model)[weight.input[0]].dtype == np.float32
    read = [name for node in model.graph.node for name in node.input]
    assert all(read.count(node.output[0]) == 1 for node in nodes(model, "DequantizeLinear"))
    assert (
        kinds(model).count("Relu") == kinds(before_it).count("Relu") - 1
    )  # a float pool reads the other Relu
    x = drawn(4, 3, 12, 12)
    np.testing.assert_array_equal(run(quark.file, {"x": x})[0], run(file, {"x": x})[0])


@runs("RemoveQDQConvClip", "RemoveQDQConvRelu", "RemoveQDQInstanceNorm", "CalibPassthroughOpTypes", "RemoveInputInit",
      "IgnoreWarnings")  # fmt: skip
def test_a_static_file_has_this_in_any_case(
    quark: Quark, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = quark.static(mixed(tmp_path))
    assert before(model, "Clip") == {"Conv"} and before(model, "Relu") == {"Conv", "InstanceNormalization"}
    assert not {one.name for one in model.graph.input} & set(initializers(model))
    told = capsys.readouterr().err.splitlines()
    assert all(
        line.startswith(("note:", "warning:", "exporting", "calibrating", "verifying")) for line in told
    )
    passed = quark.static(plain(tmp_path))
    (pool,), (mean,) = nodes(passed, "MaxPool"), nodes(passed, "GlobalAveragePool")
    assert pair_of(passed, pool, 0)[1:] == pair_of(passed, mean, 0)[1:]


@runs("RemoveQDQConvLeakyRelu", "RemoveQDQConvPRelu", "RemoveQDQConvGelu", "RemoveQDQBetweenOps",
      "OpTypesToExcludeOutputQuantization", "NodesToExcludeOutputQuantization")  # fmt: skip
def test_pairs_are_dropped_by_types_and_names(quark: Quark, tmp_path: Path) -> None:
    before_it = quark.static(activated(tmp_path))
    file = quark.file
    assert all(before(before_it, kind) & _PAIR for kind in ("LeakyRelu", "PRelu", "Gelu"))
    asked = "[Conv:LeakyRelu,Conv:PRelu,Conv:Gelu]"
    few = quark.cleaned(file, "mode=clean", "clean.fold=none", f"clean.drop_pairs={asked}")
    assert not any(before(few, kind) & _PAIR for kind in ("LeakyRelu", "PRelu", "Gelu"))
    assert kinds(few).count(_QUANTIZE) == kinds(before_it).count(_QUANTIZE) - 3
    every = quark.cleaned(file, "mode=clean", "clean.fold=none", "clean.drop_pairs=[Conv:*]")
    assert _QUANTIZE not in behind(every, "Conv")
    one = quark.cleaned(file, "mode=clean", "clean.fold=none", "clean.drop_pairs=[/net/c1:*]")
    assert kinds(one).count(_QUANTIZE) == kinds(before_it).count(_QUANTIZE) - 1


@runs("CalibTensorRangeSymmetric", "CalibMovingAverage", "CalibMovingAverageConstant", "Percentile", "LWPMetric",
      "PercentileCandidates", "NumBins", "CalibOptimizeDisk", "LWPUseHistogram", "UseUnsignedReLU")  # fmt: skip
def test_calibrations_differ_in_their_scales(quark: Quark, tmp_path: Path) -> None:
    source, report = plain(tmp_path), "calibration.mixed_scales=report"
    found = {}
    percentile = ("calibration=percentile", "calibration.percentile=99.999")
    for asked in (
        ("calibration=moving_average",),
        percentile,
        ("calibration=layerwise",),
        ("calibration=entropy",),
    ):
        model = quark.static(source, *asked, report)
        found[asked[0]] = float(pair_of(model, nodes(model, "Conv")[0], 0)[1])
    assert len(set(found.values())) == 4, found
    model = quark.static(
        source, "backend.activation_symmetric=true", "backend.activation_dtype=uint8", report
    )
    first, second = nodes(model, "Conv")
    # The second Conv follows a ReLU.
    assert [int(pair_of(model, conv, 0)[2]) for conv in (first, second)] == [128, 0]


@runs("UseRandomData", "RandomDataReaderInputDataRange", "CalibDataSize",
      "CalibWorkerNum", "CalibOptimizeMem", "SaveTensorHistFig", "DebugMode", "EvalMetrics", "EvalDataReader",
      "TmpDir")  # fmt: skip
def test_data_are_drawn_and_tensors_compared(
    quark: Quark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    quark.typed.append("TMPDIR=DIR")
    model = quark.static(
        plain(tmp_path), "data=drawn", "data.count=512", "data.ranges={x:[0,1]}",
        "data.workers=2", "calibration.images=512", "calibration.batch_size=16",
        "analysis.histograms=true", "analysis.tensors=16", "trainer.debug=true", "verify.outputs=true",
        "verify.images=1000",
    )  # fmt: skip
    _, scale, zero = pair_of(model, nodes(model, "Conv")[0], 0)
    assert zero == 0 and abs(float(scale) * 255 - 1) < 0.02
    assert "cosine" in capsys.readouterr().out
    assert len(list(quark.file.parent.rglob("*.png"))) > 5


@runs(
    "MinMSEModePof2Scale",
    "WeightCalibrateMethod",
    "MinMSEModeFloatScale",
    "TensorsRangeFile",
    "SaveAndRestore",
)
def test_least_squares_and_powers_of_two(quark: Quark, tmp_path: Path) -> None:
    source = plain(tmp_path)
    least = ("calibration=mse", "calibration.weights=mse")
    model = quark.static(source, *least, "backend.scale_type=pow2", "calibration.cache=ranges.safetensors")
    scales = [initializers(model)[node.input[1]] for node in nodes(model, "DequantizeLinear")]
    assert all((np.log2(scale.astype(np.float64)) % 1 == 0).all() for scale in scales)
    assert (tmp_path / "ranges.safetensors").is_file()
    again = quark.command(
        source, "mode=static", "data=drawn", "data.count=32", "data.workers=0", "calibration.images=16",
        "calibration.batch_size=8", "verify.latency_runs=2", "verify.threads=1", "verify.max_drop=null",
        "verify.min_agreement=null", "trainer.progress=false", *least, "backend.scale_type=pow2",
        "calibration.cache=ranges.safetensors",
    )  # fmt: skip
    assert onnx.load(again / "model.static.onnx").SerializeToString() == model.SerializeToString()
    plain_max = quark.static(source, "calibration.weights=max")
    clipped = quark.static(source, "calibration.weights=mse")
    first, second = (pair_of(one, nodes(one, "Gemm")[0], 1)[1] for one in (plain_max, clipped))
    assert (second <= first).all()  # at 8 bits, most scales equal those of the maximum


@runs("QuantizeBias", "Int32Bias", "Int16Bias", "AdjustWeightScaleForInt32Bias", "AdjustBiasScale", "Int16Scale",
      "UseFP32Scale")  # fmt: skip
def test_biases_and_scales_have_their_types(quark: Quark, tmp_path: Path) -> None:
    source = plain(tmp_path)
    model = quark.static(source, "backend.bias_dtype=int32", "backend.scale_type=float")
    for node in (*nodes(model, "Conv"), *nodes(model, "Gemm")):
        x, weight, (bias, scale, _) = (pair_of(model, node, place) for place in range(3))
        assert bias.dtype == np.int32 and scale.dtype == np.float32
        np.testing.assert_allclose(scale, x[1] * weight[1], rtol=1e-6)
    narrow = quark.static(source, "backend.bias_dtype=int16")
    assert pair_of(narrow, nodes(narrow, "Conv")[0], 2)[0].dtype == np.int16
    whole = quark.static(source, "backend.scale_type=int16")
    for node in nodes(whole, "DequantizeLinear"):
        scale = np.atleast_1d(initializers(whole)[node.input[1]]).astype(np.float64)
        fraction, _ = np.frexp(scale)
        if initializers(whole).get(node.input[0], np.zeros(1)).dtype != np.int32:
            assert (fraction * 2**15 % 1 == 0).all()


@runs("ActivationScaled", "WeightScaled", "BF16QDQToCast", "RefineBlockAxis", "BFPAttributes", "MXAttributes",
      "BF16WithClip", "EnableVaimlBF16")  # fmt: skip
def test_formats_round_inputs_and_weights(quark: Quark, tmp_path: Path) -> None:
    source, simulated = plain(tmp_path), "backend=simulated"
    for name in ("float8_e4m3fn", "bfp16", "mxfp8_e4m3"):
        types = (f"backend.activation_dtype={name}", f"backend.weight_dtype={name}")
        model = quark.static(source, simulated, *types)
        assert any(one.name == name for one in model.functions), name
        assert all(
            made_by(model, node) in {one.name for one in model.functions} for node in nodes(model, "Conv")
        )
    bfloat16 = ("backend.activation_dtype=bfloat16", "backend.weight_dtype=bfloat16")
    model = quark.static(source, simulated, *bfloat16)
    (function,) = model.functions
    assert [node.op_type for node in function.node] == ["Cast", "Cast"]
    file = quark.file
    clipped = quark.cleaned(file, "mode=clean", "clean.fold=none", "clean.rewrite=[bfloat16_clip]")
    assert kinds(clipped).count("Clip") == 3
    bare = quark.cleaned(file, "mode=clean", "clean.drop_pairs=['*:*']", "clean.fold=exact")
    assert "Cast" not in kinds(bare) and not bare.functions
    for one in bare.graph.initializer:
        if one.data_type == TensorProto.FLOAT and len(one.dims) > 1:
            assert not (onnx.numpy_helper.to_array(one).view(np.uint32) & 0xFFFF).any()


def made_by(model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    """Returns the type of the node that produces a node's first input."""
    types: dict[str, str] = {name: one.op_type for one in model.graph.node for name in one.output}
    return types[node.input[0]]


@runs("WeightsOnly", "UseMatMulNBits", "MatMulNBitsParams")
def test_weights_alone_are_quantized(quark: Quark, tmp_path: Path) -> None:
    eight = quark.quantized(plain(tmp_path), "mode=weight_only")
    assert _QUANTIZE not in kinds(eight) and before(eight, "Conv", 1) == _PAIR
    params = ("weights.bits=4", "weights.block=16", "weights.symmetric=true")
    four = quark.quantized(attention(tmp_path), "mode=weight_only", *params)
    (first, *rest) = nodes(four, "MatMulNBits")
    assert len(rest) == 2 and len(first.input) == 3  # symmetric: no zero_point
    held = {one.name: one.i for one in first.attribute}
    assert (held["bits"], held["K"], held["N"]) == (4, 16, 16)


@runs("CryptoMode", "EncryptionAlgorithm", "PrintSummary")
def test_files_are_encrypted_and_summarized(
    quark: Quark, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = plain(tmp_path)
    quark.static(source)
    quark.command(quark.file, "mode=summary")
    assert "int8" in capsys.readouterr().out
    (tmp_path / "my.key").write_bytes(bytes(range(32)))
    folder = quark.command(
        source, "mode=static", "data=drawn", "data.count=32", "data.workers=0", "calibration.images=16",
        "verify.latency_runs=2", "verify.threads=1", "verify.max_drop=null", "verify.min_agreement=null",
        "trainer.progress=false", "export.encrypt=my.key",
    )  # fmt: skip
    written = (folder / "model.static.onnx").read_bytes()
    assert b"QuantizeLinear" not in written and b"Conv" not in written
    assert json.loads((folder / "report.json").read_text())
