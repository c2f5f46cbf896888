"""Tests of the rows of docs/quark.md whose keys change a file's operators.

Each row is run once and checked against the written file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from clean_nets import drawn, kinds, run, save, sizes
from command_line import Launch
from onnx import TensorProto
from quark_commands import Quark, commands
from quark_rows import (
    APPROXIMATED,
    PART_WEIGHTS,
    PARTS,
    UNTIDY,
    UNTIDY_WEIGHTS,
    before,
    initializers,
    runs,
)


@pytest.fixture
def quark(request: pytest.FixtureRequest, launch: Launch, tmp_path: Path) -> Iterator[Quark]:
    yield from commands(request, launch, tmp_path)


_AS_IS = ("mode=clean", "clean.fold=none")


@runs(
    "PreprocessYAML", "ShapeShifterYaml", "ConvertBNToConv", "ConvertReduceMeanToGlobalAvgPool", "SplitLargeKernelPool",
    "ConvertSplitToSlice", "ConvertClipToRelu", "FuseInstanceNorm", "FuseL2Norm", "FuseGelu", "FuseLayerNorm",
)  # fmt: skip
def test_operators_are_written_otherwise(quark: Quark, tmp_path: Path) -> None:
    names = (
        "layer_norm,instance_norm,l2_norm,gelu,relu,batch_norm_of_concat,batch_norm_to_conv,mean_to_pool,"
        "split_pool,split_to_slice"
    )
    source = save(tmp_path / "parts.onnx", PARTS, PART_WEIGHTS)
    kept = "clean.approximate=[]"
    model = quark.cleaned(source, "mode=clean", "clean.fold=exact", f"clean.rewrite=[{names}]", kept)
    found = Counter(kinds(model))
    norms = ("LayerNormalization", "InstanceNormalization", "LpNormalization", "Gelu", "Relu")
    assert [found[kind] for kind in norms] == [1] * 5
    # The single BatchNormalization became a depthwise convolution; the Concat's is folded into both Convs.
    assert (found["Conv"], found["BatchNormalization"], found["Slice"], found["Split"]) == (3, 0, 2, 0)
    assert (found["ReduceMean"], found["AveragePool"], found["GlobalAveragePool"]) == (0, 2, 2)
    x = drawn(2, 6, 36, 30, seed=20)
    for ours, theirs in zip(run(quark.file, {"x": x}), run(source, {"x": x}), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@runs("OptimizeModel", "FoldBatchNorm", "FillAllValueInfo")
def test_everything_folds_and_all_tensors_have_types(quark: Quark, tmp_path: Path) -> None:
    model = quark.cleaned(
        save(tmp_path / "untidy.onnx", UNTIDY, UNTIDY_WEIGHTS), "mode=clean", "clean.fold=all",
        "clean.rewrite=[batch_norm_of_concat]",
    )  # fmt: skip
    assert "BatchNormalization" not in kinds(model)
    typed = {one.name for one in (*model.graph.value_info, *model.graph.output)}
    assert {name for node in model.graph.node for name in node.output} <= typed


@runs("SimplifyModel", "SimplifyModelOptions")
def test_exact_folding_keeps_every_value(quark: Quark, tmp_path: Path) -> None:
    source = save(tmp_path / "untidy.onnx", UNTIDY, UNTIDY_WEIGHTS)
    model = quark.cleaned(source, "mode=clean", "clean.fold=exact")
    assert kinds(model) == ["Conv", "BatchNormalization", "Mul", "Add"]
    x = drawn(2, 3, 5, 8)
    np.testing.assert_array_equal(run(quark.file, {"x": x})[0], run(source, {"x": x})[0])


@runs("SkipPreprocess")
def test_nothing_changes_unless_asked_for(quark: Quark, tmp_path: Path) -> None:
    model = quark.cleaned(save(tmp_path / "untidy.onnx", UNTIDY, UNTIDY_WEIGHTS), *_AS_IS)
    assert kinds(model) == kinds(onnx.load(tmp_path / "untidy.onnx"))


@runs("ConvertNCHWToNHWC", "ConvertOpsetVersion", "FixShapes", "CopySharedInit", "CopyBiasInit")
def test_ends_opset_sizes_and_initializers_change(quark: Quark, tmp_path: Path) -> None:
    source = save(tmp_path / "untidy.onnx", UNTIDY, UNTIDY_WEIGHTS)
    asked = ("clean.layout={x:nhwc}", "clean.opset=20", "clean.fix_shapes={batch:1}", "clean.unshare=true")
    model = quark.cleaned(source, *_AS_IS, *asked)
    assert sizes(model.graph.input[0]) == [1, "h", 8, 3] and before(model, "Conv") == {"Transpose"}
    assert [one.version for one in model.opset_import if not one.domain] == [20]
    read = [name for node in model.graph.node for name in node.input]
    assert all(read.count(name) == 1 for name in initializers(model))
    x = drawn(1, 3, 5, 8)
    (ours,) = run(quark.file, {"x": np.ascontiguousarray(x.transpose(0, 2, 3, 1))})
    np.testing.assert_allclose(ours, run(source, {"x": x})[0], rtol=1e-5, atol=1e-5)


@runs(
    "ReplaceClip6Relu", "SimulateDPU", "ConvertLeakyReluToDPUVersion", "ConvertSigmoidToHardSigmoid",
    "ConvertHardSigmoidToDPUVersion", "ConvertAvgPoolToDPUVersion", "ConvertClipToDPUVersion",
    "ConvertReduceMeanToDPUVersion", "ConvertSoftmaxToDPUVersion",
)  # fmt: skip
def test_approximations_replace_operators(
    quark: Quark,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = "relu6,leaky_relu,sigmoid,hard_sigmoid,average_pool,reduce_mean,clip,softmax"
    source = save(tmp_path / "approximated.onnx", APPROXIMATED)
    model = quark.cleaned(source, *_AS_IS, f"clean.approximate=[{names}]")
    found = Counter(kinds(model))
    assert (found["Softmax"], found["Sigmoid"], found["Relu"], found["Clip"]) == (0, 0, 1, 1)
    (leaky,) = [node for node in model.graph.node if node.op_type == "LeakyRelu"]
    assert leaky.attribute[0].f == 26 / 256
    held = {round(value.item(), 6) for value in initializers(model).values() if value.size == 1}
    # Constants of the HardSigmoids and the pool.
    assert {round(2731 / 16384 * 6, 6), round(7 / 64 * 9, 6)} <= held
    error = json.loads((quark.file.parent / "clean.json").read_text())["approximation_db"]
    assert 5 < min(error.values() if isinstance(error, dict) else [error]) < 60
    assert "dB" in capsys.readouterr().out


@runs("ConvertFP16ToFP32", "QuantizeFP16", "RandomDataReaderInputShape")
def test_a_float16_file_is_quantized_in_float32(quark: Quark, tmp_path: Path) -> None:
    half = {name: value.astype(np.float16) for name, value in UNTIDY_WEIGHTS.items()}
    text = UNTIDY.replace("float[", "float16[").replace(
        "two = Add (one, one)", "k = Cast <to: int = 10> (one)  two = Add (k, k)"
    )
    source = save(tmp_path / "half.onnx", text, half)
    model = quark.static(source, "clean.float32=true", "data.sizes={x:[8]}")
    assert {one.type.tensor_type.elem_type for one in (*model.graph.input, *model.graph.output)} == {1}
    held = {one.data_type for one in model.graph.initializer}
    assert TensorProto.FLOAT16 not in held and {TensorProto.INT8, TensorProto.INT32} <= held


@runs("UserCustomOpLibPath")
def test_operators_of_a_library_stay(quark: Quark, tmp_path: Path) -> None:
    extensions = pytest.importorskip(
        "onnxruntime_extensions", reason="no onnxruntime-extensions is installed"
    )
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.contrib" : 1]> net (float[b, 8] x) => (float[b, 8] y) {
      a = MatMul (x, w)  below, above = ai.onnx.contrib.NegPos (a)  d = Sub (above, below)  y = MatMul (d, w) }"""
    source = save(tmp_path / "net.onnx", text, {"w": drawn(8, 8)})
    model = quark.static(source, f"clean.custom_ops=[{extensions.get_library_path()}]")
    assert kinds(model).count("NegPos") == 1 and before(model, "MatMul") == {"DequantizeLinear"}
