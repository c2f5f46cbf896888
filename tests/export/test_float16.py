"""Tests of mode float16 on values that float16 cannot hold, in ONNX Runtime and onnx's evaluator in NumPy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import float_files
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from qatkit.export import ort_modes
from qatkit.jobs import quantize_file

Array = NDArray[np.float32]
DRAW = np.random.default_rng(3)
# The last image is all zeros, so that epsilons matter.
IMAGES = np.concatenate([DRAW.normal(size=(15, 3, 8, 8)), np.zeros((1, 3, 8, 8))]).astype(np.float32)


def node(kind: str, inputs: str, output: str, **settings: Any) -> NodeProto:
    return helper.make_node(kind, inputs.split(), [output], f"{kind}_{output}", **settings)


def number(value: float) -> Array:
    return np.array(value, np.float32)


def matrix(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


FLAT, HEAD = node("Flatten", "input", "f"), node("MatMul", "h fc", "output")
Case = tuple[list[NodeProto], dict[str, NDArray[Any]]]


def log_mel() -> Case:
    """Returns the nodes and weights of a log-mel spectrogram of loud samples."""
    nodes = [FLAT, node("Mul", "f loud", "x"), node("MatMul", "x cos", "re"), node("MatMul", "x sin", "im"),
             node("Mul", "re re", "re2"), node("Pow", "im two", "im2"), node("Add", "re2 im2", "power"),
             node("MatMul", "power mel", "m"), node("Add", "m eps", "e"), node("Log", "e", "log"),
             node("Mul", "log tenth", "h"), HEAD]  # fmt: skip
    return nodes, {
        "loud": number(100), "cos": matrix(192, 40), "sin": matrix(192, 40)[::-1].copy(), "two": number(2),
        "mel": np.abs(matrix(40, 24)), "eps": number(1e-10), "tenth": number(0.1), "fc": matrix(24, 10),
    }  # fmt: skip


def quiet_mel() -> Case:
    """Returns the spectrogram of `log_mel` for samples so quiet that their power is zero in float16."""
    nodes, weights = log_mel()
    return nodes, weights | {"loud": number(1e-4), "eps": number(1e-14)}


def exponentials() -> Case:
    nodes = [FLAT, node("MatMul", "f a", "x"), node("Exp", "x", "e"), node("ReduceSum", "e axes", "s", keepdims=1),
             node("Log", "s", "log"), node("Sub", "x log", "h"), HEAD]  # fmt: skip
    return nodes, {"a": matrix(192, 24) / 2, "axes": np.array([1], np.int64), "fc": matrix(24, 10)}


def masked(least: float) -> Callable[[], Case]:
    def case() -> Case:
        nodes = [
            FLAT,
            node("MatMul", "f a", "x"),
            node("Add", "x mask", "masked"),
            node("Softmax", "masked", "h"),
            HEAD,
        ]
        mask = np.where(np.arange(24) % 3 == 0, np.float32(least), np.float32(0))
        return nodes, {"a": matrix(192, 24) / 20, "mask": mask, "fc": matrix(24, 10)}

    return case


def where_masked() -> Case:
    nodes = [FLAT, node("MatMul", "f a", "x"), node("Where", "yes x least", "w"),
             node("Softmax", "w", "h"), HEAD]  # fmt: skip
    return nodes, {
        "a": matrix(192, 24) / 20,
        "yes": np.arange(24) % 3 > 0,
        "least": number(-1e30),
        "fc": matrix(24, 10),
    }


def normalized() -> Case:
    """Returns a LayerNorm of large values in single operators; its epsilon matters for the image of zeros."""
    nodes = [FLAT, node("MatMul", "f a", "x"), node("ReduceMean", "x", "mean", axes=[1]), node("Sub", "x mean", "c"),
             node("Pow", "c two", "c2"), node("ReduceMean", "c2", "var", axes=[1]), node("Add", "var eps", "v"),
             node("Sqrt", "v", "d"), node("Div", "c d", "h"), HEAD]  # fmt: skip
    return nodes, {"a": matrix(192, 24) * 50, "two": number(2), "eps": number(1e-12), "fc": matrix(24, 10)}


def unit() -> Case:
    nodes = [FLAT, node("MatMul", "f a", "x"), node("ReduceL2", "x", "n", axes=[1]), node("Add", "n eps", "d"),
             node("Div", "x d", "h"), HEAD]  # fmt: skip
    return nodes, {"a": matrix(192, 24) * 9, "eps": number(1e-12), "fc": matrix(24, 10)}


def two_readers() -> Case:
    """Returns a net whose float32 operators share the input, a large tensor and constants."""
    nodes = [FLAT, node("Mul", "f big", "x"), node("Sub", "x big", "y"), node("Add", "x y", "z"),
             node("Mul", "z z", "q"), node("Sqrt", "q", "r"), node("Div", "r big", "s"), node("MatMul", "s a", "t"),
             node("Add", "t eps", "h"), HEAD]  # fmt: skip
    return nodes, {"big": number(3e5), "a": matrix(192, 24) / 9, "eps": number(1e-9), "fc": matrix(24, 10)}


def at_the_end() -> Case:
    nodes = [FLAT, node("MatMul", "f a", "x"), node("Mul", "x big", "output")]
    return nodes, {"a": matrix(192, 10), "big": number(1e6)}


def large_weight() -> Case:
    nodes = [FLAT, node("MatMul", "f a", "x"), node("Mul", "x small", "h"), HEAD]
    return nodes, {"a": matrix(192, 24) * 1e5, "small": number(1e-5), "fc": matrix(24, 10)}


CASES: dict[str, Callable[[], Case]] = {
    "log-mel": log_mel, "quiet log-mel": quiet_mel, "exponentials": exponentials, "mask of -inf": masked(-np.inf),
    "mask of -1e9": masked(-1e9), "where": where_masked, "LayerNorm in parts": normalized, "unit": unit,
    "two readers": two_readers, "at the end": at_the_end, "large weight": large_weight,
}  # fmt: skip


# Cases whose weight belongs to an operator with a large constant; the mask becomes the bias of a Gemm.
FUSED = ("large weight", "mask of -1e9")


def write(path: Path, nodes: list[NodeProto], weights: dict[str, NDArray[Any]]) -> Path:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), str(path))
    return path


@pytest.mark.parametrize("given", [True, False], ids=["images", "drawn"])
@pytest.mark.parametrize("case", CASES)
def test_values_beyond_float16_stay_float32(case: str, given: bool, tmp_path: Path) -> None:
    """Without images, ranges come from random inputs, none of which is all zeros."""
    source, target = write(tmp_path / "float.onnx", *CASES[case]()), tmp_path / "half.onnx"
    kept = ort_modes.float16(source, target, [IMAGES[:8], IMAGES[8:]] if given else [])
    assert bool(kept.names) == (case != "mask of -inf")
    exact = float_files.logits(source, IMAGES)
    names = {one.type.tensor_type.elem_type for one in onnx.load(str(target)).graph.output}
    assert np.isfinite(exact).all() and names == {TensorProto.FLOAT}
    (by_numpy,) = cast("list[Array]", ReferenceEvaluator(str(target)).run(None, {"input": IMAGES}))
    for found in (
        float_files.logits(target, IMAGES),
        float_files.logits(target, IMAGES, optimize=False),
        by_numpy,
    ):
        assert np.isfinite(found).all()
        assert np.abs(found - exact).max() < 5e-3 * np.abs(exact).max()


@pytest.mark.parametrize("case", CASES)
def test_what_float16_holds_is_float16(case: str, tmp_path: Path) -> None:
    nodes, weights = CASES[case]()
    ort_modes.float16(write(tmp_path / "float.onnx", nodes, weights), tmp_path / "half.onnx", [IMAGES])
    held = {one.name: one.data_type for one in onnx.load(str(tmp_path / "half.onnx")).graph.initializer}
    if "fc" in weights:
        assert held["fc"] == TensorProto.FLOAT16
    assert held["a" if "a" in held else "cos"] == (
        TensorProto.FLOAT if case in FUSED else TensorProto.FLOAT16
    )


def test_operators_after_another_domain_are_cast(tmp_path: Path) -> None:
    """No types are inferred after an operator of another domain; the converter casts only typed tensors."""
    nodes = [FLAT, node("MatMul", "f a", "x"), node("Gelu", "x", "g", domain="com.microsoft"), node("Exp", "g", "e"),
             node("Log", "e", "h"), HEAD]  # fmt: skip
    weights: dict[str, NDArray[Any]] = {"a": matrix(192, 24) / 3, "fc": matrix(24, 10)}
    source, target = write(tmp_path / "float.onnx", nodes, weights), tmp_path / "half.onnx"
    assert ort_modes.float16(source, target, [IMAGES]).names == ["Exp_e", "Log_h"]
    exact, found = (float_files.logits(path, IMAGES) for path in (source, target))
    assert np.abs(found - exact).max() < 5e-3 * np.abs(exact).max()


def test_a_usual_network_is_float16_throughout(tmp_path: Path) -> None:
    assert (
        ort_modes.float16(float_files.trained(), tmp_path / "half.onnx", [float_files.digits()[0][:16]]).names
        == []
    )


def test_the_report_counts_what_stays_float32(tmp_path: Path) -> None:
    nodes, weights = log_mel()
    config = float_files.settings(write(tmp_path / "float.onnx", nodes, weights), "float16", tmp_path / "run")
    config.verify.max_drop = None
    assert quantize_file.quantize(config) == 0
    notes = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    (said,) = [note for note in notes if note.startswith("float16: ")]
    assert " operators stay float32 because float16 cannot hold the values: " in said
    assert int(said.split()[1]) >= 6
