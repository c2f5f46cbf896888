"""Tests of all modes on float ONNX files with any inputs and outputs; samples are arrays by input name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from command_line import run_script
from float_files import made
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from qatkit.config.schema import (
    CalibrationConfig,
    Config,
    DataConfig,
    ModelConfig,
    OverrideConfig,
    TrainerConfig,
    VerifyConfig,
)
from qatkit.jobs import quantize_file
from qatkit_verify.errors import ConfigError

Arrays = dict[str, NDArray[Any]]
TOOLS = ("dynamic", "float16", "weight_only")
MODES = (*TOOLS, "static")
FLOAT, INT64, INT32, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
COUNT = 48


def node(kind: str, inputs: str, outputs: str, **settings: Any) -> NodeProto:
    return helper.make_node(
        kind, inputs.split(), outputs.split(), f"/{outputs.split()[0]}/{kind}", **settings
    )


def drawn(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).normal(0, scale, shape).astype(np.float32)


def save(
    path: Path,
    nodes: list[NodeProto],
    inputs: Mapping[str, tuple[int, Any]],
    outputs: Mapping[str, int],
    weights: Arrays,
    opset: int = 13,
    ir_version: int = 8,
) -> Path:
    ends = [helper.make_tensor_value_info(name, *told) for name, told in inputs.items()]
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    if ir_version < 4:  # they list initializers among the inputs
        ends += [helper.make_tensor_value_info(one.name, one.data_type, list(one.dims)) for one in held]
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    graph = helper.make_graph(nodes, "net", ends, results, held)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), str(path))
    return path


def several(path: Path) -> tuple[Path, Arrays]:
    """Returns a file and its samples: ids, a mask and a vector give features, a sum and the largest id."""
    nodes = [
        node("Gather", "table ids", "embedded"),
        node("Cast", "mask", "weights", to=FLOAT),
        node("Unsqueeze", "weights last", "column"),
        node("Mul", "embedded column", "masked"),
        node("ReduceMean", "masked", "mean", axes=[1], keepdims=0),
        node("Gemm", "vector a", "projected"),
        node("Add", "mean projected", "sum"),
        node("Relu", "sum", "relu"),
        node("MatMul", "relu b", "features"),
        node("ReduceMax", "ids", "largest", axes=[1], keepdims=0),
    ]
    weights: Arrays = {"table": drawn(50, 32), "a": drawn(16, 32, scale=0.3), "b": drawn(32, 24, scale=0.3)}
    weights["last"] = np.array([-1], np.int64)
    inputs = {"ids": (INT64, ["n", "t"]), "mask": (BOOL, ["n", "t"]), "vector": (FLOAT, ["n", 16])}
    outputs = {"features": FLOAT, "sum": FLOAT, "largest": INT64}
    draw = np.random.default_rng(1)
    given = {
        "ids": draw.integers(0, 50, (COUNT, 6)),
        "mask": draw.random((COUNT, 6)) > 0.3,
        "vector": draw.normal(size=(COUNT, 16)).astype(np.float32),
    }
    return save(path, nodes, inputs, outputs, weights), given


def stateful(path: Path) -> tuple[Path, Arrays]:
    """Returns a file that computes a step of a recurrent network for a batch of 1, and its samples."""
    nodes = [
        node("MatMul", "frame a", "x"),
        node("Concat", "x state", "both", axis=-1),
        node("MatMul", "both b", "next"),
        node("Tanh", "next", "state_out"),
        node("MatMul", "state_out c", "logit"),
        node("Sigmoid", "logit", "probability"),
    ]
    weights: Arrays = {
        "a": drawn(64, 32, scale=0.2),
        "b": drawn(64, 32, scale=0.2),
        "c": drawn(32, 1, scale=0.3),
    }
    inputs = {"frame": (FLOAT, [1, 64]), "state": (FLOAT, [1, 32])}
    given = {"frame": drawn(COUNT, 64), "state": np.tanh(drawn(COUNT, 32))}
    return save(path, nodes, inputs, {"probability": FLOAT, "state_out": FLOAT}, weights), given


def int32_ids(path: Path) -> tuple[Path, Arrays]:
    nodes = [
        node("Gather", "table ids", "x"),
        node("Transpose", "x", "t", perm=[0, 2, 1]),
        node("Conv", "t w", "c", pads=[1, 1]),
        node("Relu", "c", "r"),
        node("ReduceMax", "r", "m", axes=[2], keepdims=0),
        node("Gemm", "m fc", "logits"),
        node("Softmax", "logits", "scores", axis=-1),
    ]
    weights: Arrays = {
        "table": drawn(257, 16),
        "w": drawn(32, 16, 3, scale=0.2),
        "fc": drawn(32, 8, scale=0.3),
    }
    given = {"ids": np.random.default_rng(2).integers(0, 257, (COUNT, 40)).astype(np.int32)}
    return save(path, nodes, {"ids": (INT32, ["n", 40])}, {"scores": FLOAT}, weights), given


def old(path: Path) -> tuple[Path, Arrays]:
    """Returns a file of opset 7 and IR version 3: its initializers are inputs, and its nodes are unsorted."""
    nodes = [
        node("Relu", "c", "r"),
        node("Conv", "signal w b", "c", pads=[1, 1]),
        node("Gemm", "f fc k", "out"),
        node("Flatten", "r", "f"),
    ]
    weights: Arrays = {"w": drawn(8, 2, 3), "b": drawn(8), "fc": drawn(128, 6, scale=0.1), "k": drawn(6)}
    given = {"signal": drawn(COUNT, 2, 16)}
    inputs = {"signal": (FLOAT, ["n", 2, 16])}
    return save(path, nodes, inputs, {"out": FLOAT}, weights, opset=7, ir_version=3), given


def contrib(path: Path) -> tuple[Path, Arrays]:
    """Returns a file with an operator of com.microsoft, after which no types are inferred."""
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("Gelu", "c", "g", domain="com.microsoft"),
        node("Conv", "g v", "d", pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "d", "p"),
        node("Flatten", "p", "out"),
    ]
    weights: Arrays = {"w": drawn(8, 3, 3, 3, scale=0.3), "v": drawn(16, 8, 3, 3, scale=0.3)}
    inputs = {"x": (FLOAT, ["n", 3, "h", "w"])}
    return save(path, nodes, inputs, {"out": FLOAT}, weights), {"x": drawn(COUNT, 3, 8, 10)}


def energies(path: Path) -> tuple[Path, Arrays]:
    """Returns a file like a speech recognizer's front end, with squares above float16's maximum, and its samples."""
    nodes = [
        node("Mul", "signal gain", "x"),
        node("Mul", "x x", "power"),
        node("MatMul", "power mel", "bands"),
        node("Add", "bands eps", "positive"),
        node("Log", "positive", "log"),
        node("MatMul", "log a", "hidden"),
        node("Relu", "hidden", "relu"),
        node("MatMul", "relu b", "out"),
    ]
    weights: Arrays = {"mel": np.abs(drawn(64, 20)), "eps": np.array(1e-6, np.float32)}
    weights |= {"a": drawn(20, 32, scale=0.1), "b": drawn(32, 8, scale=0.2)}
    given = {"signal": drawn(COUNT, 64), "gain": np.geomspace(1, 900, COUNT, dtype=np.float32)[:, None]}
    inputs = {"signal": (FLOAT, ["n", 64]), "gain": (FLOAT, ["n", 1])}
    return save(path, nodes, inputs, {"out": FLOAT}, weights), given


FILES: dict[str, Callable[[Path], tuple[Path, Arrays]]] = {
    "several inputs": several, "states": stateful, "int32": int32_ids, "opset 7": old, "com.microsoft": contrib,
    "energies": energies,
}  # fmt: skip


def settings(path: Path, mode: str, folder: Path, root: Path, **verify: Any) -> Config:
    return Config(
        name="file",
        output_dir=str(folder),
        onnx=str(path),
        mode=mode,
        data=DataConfig("qatkit.data.arrays.arrays", str(root), workers=0, eval_batch_size=8),
        calibration=CalibrationConfig(images=16, batch_size=4),
        trainer=TrainerConfig(progress=False),
        verify=VerifyConfig(latency_runs=3, threads=1, audit=False, min_agreement=None, **verify),
    )


def samples(folder: Path, arrays: Arrays) -> Path:
    """Writes the samples to one file, even for a model with a fixed batch, and returns its folder."""
    folder.mkdir()
    np.savez(folder / "all.npz", **arrays)  # type: ignore[arg-type]
    return folder


def outputs(path: Path, arrays: Arrays, entries: dict[str, str] | None = None) -> Arrays:
    """Returns the outputs that ONNX Runtime computes for each sample on its own."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    count = len(next(iter(arrays.values())))
    rows = [session.run(None, {k: v[i : i + 1] for k, v in arrays.items()}) for i in range(count)]
    return {name: np.concatenate(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def decibel(exact: NDArray[Any], found: NDArray[Any]) -> float:
    noise = np.square(exact.astype(np.float64) - found).sum()
    return float(10 * np.log10(np.square(exact.astype(np.float64)).sum() / max(noise, 1e-300)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_inputs_has_every_mode(name: str, mode: str, tmp_path: Path) -> None:
    source, given = FILES[name](tmp_path / "float.onnx")
    config = settings(source, mode, tmp_path / "run", samples(tmp_path / "data", given))
    assert quantize_file.quantize(config) == 0
    target = tmp_path / "run" / made(mode)
    before, after = onnx.load(str(source)).graph, onnx.load(str(target)).graph
    weights = {one.name for one in before.initializer}
    assert [one for one in before.input if one.name not in weights] == list(after.input)
    assert [one.name for one in before.output] == [one.name for one in after.output]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["config"]["task"] == "outputs" and report["accuracy"] == {}
    held_back = {key: value[1::2] for key, value in given.items()}
    exact = outputs(source, held_back)
    found = outputs(target, held_back, report["session_options"])
    told = {one["name"]: one["sqnr_db"] for one in report["measured"]["outputs"]["outputs"]}
    assert list(told) == list(exact)
    for output, values in exact.items():
        if values.dtype.kind == "f":
            assert decibel(values, found[output]) > {"float16": 45, "static": 18}.get(mode, 22), output
            if mode != "dynamic":  # its ranges depend on the batch
                assert told[output] == pytest.approx(decibel(values, found[output]), abs=1.0), output
        else:
            np.testing.assert_array_equal(values, found[output])
    kinds = {TensorProto.FLOAT16} if mode == "float16" else {TensorProto.INT8}
    assert kinds <= {one.data_type for one in after.initializer}


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_sizes_that_a_file_does_not_accept_are_named(mode: str, tmp_path: Path) -> None:
    nodes = [node("Reshape", "x shape", "r"), node("MatMul", "r w", "y")]
    weights: Arrays = {"shape": np.array([0, 96], np.int64), "w": drawn(96, 4)}
    source = save(tmp_path / "float.onnx", nodes, {"x": (FLOAT, ["n", "t"])}, {"y": FLOAT}, weights)
    config = settings(source, mode, tmp_path / "run", tmp_path)
    config.data = DataConfig("qatkit.data.drawn.drawn", workers=0)
    said = r"ONNX Runtime failed on .*; data.sizes={x: 16000} was assumed, so set data.sizes to sizes that the model"
    with pytest.raises(ConfigError, match=said):
        quantize_file.quantize(config)
    config.data.sizes = {"x": 96}
    assert quantize_file.quantize(config) == 0


def test_labels_make_rows_of_logits_a_classifier(tmp_path: Path) -> None:
    source, given = int32_ids(tmp_path / "float.onnx")
    labels = outputs(source, given)["scores"].argmax(1)
    labels[0] = 7
    root = samples(tmp_path / "data", given | {"label": labels})
    config = settings(source, "weight_only", tmp_path / "run", root, max_drop=None)
    assert quantize_file.quantize(config) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["config"]["task"] == "classification"
    assert report["accuracy"]["float"]["top1"] == 100.0


def test_labels_without_rows_of_logits_are_said_to_be_left(tmp_path: Path) -> None:
    source, given = several(tmp_path / "float.onnx")
    nodes = onnx.load(str(source))
    nodes.graph.output.insert(0, helper.make_tensor_value_info("masked", FLOAT, ["n", "t", 32]))
    onnx.save(nodes, str(source))
    root = samples(tmp_path / "data", given | {"label": np.arange(COUNT) % 4})
    assert quantize_file.quantize(settings(source, "weight_only", tmp_path / "run", root)) == 0
    (note,) = json.loads((tmp_path / "run" / "report.json").read_text())["notes"]
    assert note.startswith("the first output ([2, 6, 32] for 2 samples) does not contain the logits")


@pytest.mark.parametrize("mode", MODES)
def test_a_fixed_input_is_a_constant_and_chooses_a_branch(mode: str, tmp_path: Path) -> None:
    """Checks an If whose branches have all the weights and whose condition depends on a scalar input."""

    def branch(name: str, weight: str) -> onnx.GraphProto:
        result = helper.make_tensor_value_info(name, FLOAT, None)
        conv = node("Conv", f"x {weight}", f"{name}_c", pads=[1, 1])
        mean = node("ReduceMean", f"{name}_c", name, axes=[2], keepdims=0)
        return helper.make_graph([conv, mean], name, [], [result])

    nodes = [
        node("Equal", "sr high", "yes"),
        helper.make_node(
            "If", ["yes"], ["c"], "/If", then_branch=branch("t", "w"), else_branch=branch("e", "v")
        ),
        node("Relu", "c", "out"),
    ]
    weights: Arrays = {"w": drawn(8, 2, 3), "v": drawn(8, 2, 3) * 2}
    weights["high"] = np.array(16000, np.int64)
    inputs = {"x": (FLOAT, ["n", 2, 16]), "sr": (INT64, [])}
    source = save(tmp_path / "float.onnx", nodes, inputs, {"out": FLOAT}, weights)
    given = {"x": drawn(COUNT, 2, 16)}
    config = settings(source, mode, tmp_path / "run", samples(tmp_path / "data", given))
    config.model = ModelConfig(kwargs={"fix": {"sr": 8000}})
    assert quantize_file.quantize(config) == 0
    target = tmp_path / "run" / made(mode)
    after = onnx.load(str(target)).graph
    assert [one.name for one in after.input] == ["x"] and "If" not in {one.op_type for one in after.node}
    session = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    (exact,) = session.run(None, given | {"sr": np.array(8000, np.int64)})
    entries = json.loads((tmp_path / "run" / "report.json").read_text())["session_options"]
    assert decibel(exact, outputs(target, given, entries)["out"]) > 20


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fix": {"rate": 1}}, "model.kwargs.fix=rate: expected an input of float.onnx (ids, mask, vector)"),
        (
            {"fixed": {"ids": 1}},
            "model.kwargs.fixed={ids: 1}: the key does not exist; onnx=FILE has fix, states and custom_ops",
        ),
        (
            {"custom_ops": "none.so"},
            "model.kwargs.custom_ops=none.so: expected an existing library of custom operators",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_wrong_options_of_a_file_are_one_line(
    mode: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    source, given = several(tmp_path / "float.onnx")
    config = settings(source, mode, tmp_path / "run", samples(tmp_path / "data", given))
    config.model = ModelConfig(kwargs=change)
    with pytest.raises(ConfigError) as raised:
        quantize_file.quantize(config)
    assert str(raised.value) == says and not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_samples_that_do_not_fit_the_file_are_one_line(mode: str, tmp_path: Path) -> None:
    source, given = several(tmp_path / "float.onnx")
    del given["mask"]
    config = settings(source, mode, tmp_path / "run", samples(tmp_path / "data", given))
    with pytest.raises(
        ConfigError,
        match=r"mask is missing in train\[\d+\], which has .* ids, vector; the model's inputs are ids, mask, vector",
    ):
        quantize_file.quantize(config)


@pytest.mark.slow
def test_the_command_line_takes_arrays_and_fixed_inputs(tmp_path: Path) -> None:
    source, given = several(tmp_path / "two.onnx")
    root = samples(tmp_path / "data", {key: value for key, value in given.items() if key != "vector"})
    fixed = ",".join(map(str, np.zeros(16).tolist()))
    typed = [f"onnx={source}", "mode=weight_only", "data=arrays", f"data.root={root}", "data.workers=0",
             f"+model.kwargs={{fix:{{vector:[[{fixed}]]}}}}", "trainer.progress=false",
             "verify.latency_runs=3"]  # fmt: skip
    done = run_script("export.py", *typed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SQNR of each output: features " in done.stdout and "largest not compared" in done.stdout


def test_a_conv_without_a_name_may_stay_float(tmp_path: Path) -> None:
    """Checks that an override and the audit find the Conv by its generated name.

    ONNX Runtime fuses the Conv with the next Relu.
    """
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("Relu", "c", "r"),
        node("Conv", "r v", "d", pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "d", "p"),
        node("Flatten", "p", "out"),
    ]
    for one in nodes:
        one.name = ""
    weights: Arrays = {"w": drawn(16, 3, 3, 3, scale=0.3), "v": drawn(16, 16, 3, 3, scale=0.3)}
    source = save(tmp_path / "float.onnx", nodes, {"x": (FLOAT, ["n", 3, 8, 10])}, {"out": FLOAT}, weights)
    config = settings(
        source, "static", tmp_path / "run", samples(tmp_path / "data", {"x": drawn(COUNT, 3, 8, 10)})
    )
    config.verify.audit, config.backend.overrides = True, {"Conv_c": OverrideConfig(float=True)}
    assert quantize_file.quantize(config) == 0
    audit = json.loads((tmp_path / "run" / "report.json").read_text())["audit"]
    assert audit["problems"] == [] and 0 < audit["int8_share"] < 1
