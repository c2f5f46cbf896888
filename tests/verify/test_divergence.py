"""Tests of finding the first tensor in which file and module differ, after a fault in a scale or weight."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from chain import Residual, calibrated, noise, settle
from onnx import numpy_helper
from qdq_graphs import INPUT_SCALE, LOGITS_SCALE, QdqGraph
from torch import Tensor, fx, nn

from qatkit.config.schema import VerifyConfig
from qatkit.data.inputs import ImageInputs
from qatkit.export.add_integer_ends import to_integer_io
from qatkit.export.converted_reference import ConvertedReference
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.quant.backends import FBGEMM, QNNPACK, TENSORRT, Backend
from qatkit.records.results import Divergence, Results
from qatkit.verify.checks.base import Subject
from qatkit.verify.checks.parity import ParityCheck, divergence_line
from qatkit.verify.divergence import first_divergence, optimizer_divergence

IMAGES = noise(24, 3, 12, 12)
MEAN, STD = (0.5, 0.5, 0.5), (0.15, 0.16, 0.17)


@functools.cache
def _exported(name: str, dynamic: bool) -> tuple[fx.GraphModule, bytes]:
    """Returns the converted module for a backend, and the bytes of its file."""
    (backend,) = [one for one in (FBGEMM, QNNPACK, TENSORRT) if one.name == name]
    torch.manual_seed(0)
    model = settle(Residual(), 3, 12, 12)
    with torch.no_grad():  # so that the images have several classes, and small changes matter
        model.get_submodule("fc").bias.sub_(model(IMAGES).mean(0))  # type: ignore[operator]
    converted = convert(calibrated(model, IMAGES, backend)).graph
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        export_onnx(converted, IMAGES[:2] if dynamic else IMAGES[:3], path, dynamic_batch=dynamic)
        return converted, path.read_bytes()


class Made:
    """A file and the converted module that it was exported from."""

    def __init__(self, path: Path, kind: str, backend: Backend = FBGEMM) -> None:
        self.path, self.backend = path, backend
        self.converted, content = _exported(backend.name, kind != "fixed")
        path.write_bytes(content)
        if kind == "uint8":
            logits = self.converted(IMAGES)
            to_integer_io(path, path, MEAN, STD, (float(logits.min()), float(logits.max())))

    def check(self, converted: fx.GraphModule | None = None) -> Results:
        """Returns what the parity check measures for the file against `converted`."""
        subject = Subject(
            folder=self.path.parent,
            files={"float": self.path, "int8": self.path},
            batches=lambda: [(images, torch.zeros(len(images))) for images in IMAGES.split(10)],
            timed=ImageInputs((3, 12, 12)).timed,
            settings=VerifyConfig(min_agreement=1.0, parity_images=24, threads=1),
            options=self.backend.session_options,
            reference=ConvertedReference(converted or self.converted),
        )
        return ParityCheck().measure(subject, Results("run", "m", "out"))

    def spoil_weight(self, name: str) -> None:
        """Flips the sign of one filter of a weight, only in the file."""
        model = onnx.load(str(self.path))
        (tensor,) = [t for t in model.graph.initializer if t.name == name]
        values = numpy_helper.to_array(tensor).copy()
        values[0] = -values[0]
        tensor.CopyFrom(numpy_helper.from_array(values, name))
        onnx.save(model, str(self.path))


KINDS = [
    ("plain", FBGEMM),
    ("fixed", FBGEMM),
    ("uint8", FBGEMM),
    ("plain", QNNPACK),
    ("uint8", QNNPACK),
    ("plain", TENSORRT),
]


@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_every_quantized_tensor_is_found_by_name_in_the_module(
    kind: str, backend: Backend, tmp_path: Path
) -> None:
    """The recorded integers must equal those computed by running the module node by node."""
    made = Made(tmp_path / "m.onnx", kind, backend)
    images = IMAGES[:3].numpy()
    recorded = ConvertedReference(made.converted).integers(images, made.path)
    quantized = [n for n in onnx.load(str(made.path)).graph.node if n.op_type == "QuantizeLinear"]
    ends = {n.output[0] for n in quantized if n.name.startswith(("input_normalize/", "output_quant/"))}
    assert set(recorded) == {node.output[0] for node in quantized} - ends
    seen: dict[str, Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            result = super().run_node(n)
            if str(n.target).endswith("_quant"):
                seen[str(n.target)] = result
            return result

    with torch.no_grad():
        Recorder(made.converted).run(torch.from_numpy(images))
    for name, value in recorded.items():
        path = name.partition("/")[0]
        if name != f"{path}/QuantizeLinear_output" or f"{path}/QuantizeLinear_1_output" in recorded:
            continue
        scale = made.converted.get_submodule(path).scale
        zero = made.converted.get_submodule(path).zero_point
        assert isinstance(scale, Tensor) and isinstance(zero, Tensor)
        expected = torch.round(seen[path] / scale) + zero
        np.testing.assert_array_equal(value.ravel(), expected.numpy().ravel().astype(value.dtype))


@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_a_faithful_file_has_no_first_difference(kind: str, backend: Backend, tmp_path: Path) -> None:
    made = Made(tmp_path / "m.onnx", kind, backend)
    results = made.check()
    assert results.parity is not None and results.parity.agreement == 1
    assert results.divergence is None and results.notes == ()


def _rescaled(converted: fx.GraphModule, path: str) -> fx.GraphModule:
    """Returns the module with one scale changed after export."""
    changed = copy.deepcopy(converted)
    scale = changed.get_submodule(path).scale
    assert isinstance(scale, Tensor)
    scale.mul_(40)
    return changed


@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_a_scale_that_is_changed_after_export_is_named(kind: str, backend: Backend, tmp_path: Path) -> None:
    made = Made(tmp_path / "m.onnx", kind, backend)
    paths = [n for n, _ in made.converted.named_modules() if n.endswith("_quant") and n != "input_quant"]
    for path in (paths[0], paths[-1]):
        found = made.check(_rescaled(made.converted, path)).divergence
        assert found is not None and found.first is not None
        assert found.first.name.partition("/")[0] == path
        assert found.reference == "the converted module"


# The first quantized tensor after each operator. With TensorRT, outputs of convolutions stay float.
BEHIND = {
    "fbgemm": {"stem": "stem_quant", "conv1": "conv1_quant", "conv2": "conv2_quant", "fc": "output"},
    "tensorrt": {"stem": "pool_quant", "conv1": "relu_1_quant", "conv2": "avgpool_quant", "fc": "output"},
}


@pytest.mark.parametrize("module", ["stem", "conv1", "conv2", "fc"])
@pytest.mark.parametrize(("kind", "backend"), [KINDS[0], KINDS[2], KINDS[5]])
def test_a_weight_that_is_changed_in_the_file_is_named(
    module: str, kind: str, backend: Backend, tmp_path: Path
) -> None:
    """The output of the Linear is not quantized; for it, the logits are the first tensor that differs."""
    made = Made(tmp_path / "m.onnx", kind, backend)
    made.spoil_weight(f"{module}.weight")
    found = made.check().divergence
    assert found is not None and found.first is not None and found.operator is not None
    assert found.first.name.partition("/")[0] == BEHIND[backend.name][module]
    assert found.operator.partition("/")[0] == module
    earlier = found.tensors[: found.tensors.index(found.first)]
    assert all(t.max_steps <= found.tolerance for t in earlier)


def _of_wrong_axis(path: Path) -> Path:
    """Writes a file with a weight whose scales run along its inputs.

    This is valid QDQ, but ONNX Runtime 1.31's optimizer changes its results.
    """
    graph = QdqGraph()
    x = graph.quantize("input", "input_q", INPUT_SCALE)
    first = graph.quantize(graph.gemm(x, "first"), "first_q", LOGITS_SCALE)
    weight = graph.weight("fc.weight", (16, 16), axis=0)
    y = graph.quantize(graph.node("Gemm", [first, weight], "fc", transB=0), "fc_q", LOGITS_SCALE)
    last = graph.quantize(graph.node("Sigmoid", [y], "sigmoid"), "sigmoid_q", 1 / 255, zero=0)
    return graph.save(path, last, ["N", 16], 2)


def test_what_the_optimizer_computes_otherwise_is_named(tmp_path: Path) -> None:
    """Covers a check without a reference module, and with one that agrees with the unoptimized file."""
    path = _of_wrong_axis(tmp_path / "m.onnx")
    images = np.random.default_rng(0).standard_normal((24, 16), dtype=np.float32)
    found = optimizer_divergence(path, images[:4])
    assert found.first is not None and found.first.name == "fc_q_out" and found.operator == "fc"
    assert [t.name for t in found.tensors][:2] == ["input_q_out", "first_q_out"]

    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options)

    class Written:
        """A module that computes what the file says."""

        def __call__(self, images: object) -> np.ndarray:
            return session.run(None, {"input": np.asarray(images)})[0]  # type: ignore[no-any-return]

        def integers(self, images: object, file: Path) -> dict[str, np.ndarray]:
            raise AssertionError("the exporter is not at fault")

    for reference in (None, Written()):
        subject = Subject(
            folder=tmp_path,
            files={"float": path, "int8": path},
            batches=lambda: [(images, np.zeros(24))],
            timed=ImageInputs((16,)).timed,
            settings=VerifyConfig(threads=1),
            reference=reference,
        )
        results = ParityCheck().measure(subject, Results("run", "m", "out"))
        assert results.divergence is not None and results.divergence.first is not None
        assert results.divergence.first.name == "fc_q_out"
        said = ParityCheck().shortfalls(subject.settings, results)
        assert "; the first tensor that differs is 'fc_q_out'" in said[0].line
        assert "against the same file without optimizations" in divergence_line(results.divergence)


def test_floats_are_compared_in_steps_of_their_range(tmp_path: Path) -> None:
    """In a file without QuantizeLinear, all float tensors that the optimized graph keeps are compared."""
    graph = QdqGraph()
    weight = graph.constant("w", np.random.default_rng(0).standard_normal((16, 16)))
    y = graph.node("Sigmoid", [graph.node("MatMul", ["input", weight], "fc")], "sigmoid")
    path = graph.save(tmp_path / "m.onnx", y, ["N", 16], 2)
    found = optimizer_divergence(path, np.random.default_rng(1).standard_normal((4, 16), dtype=np.float32))
    assert {"fc_out", "output"} <= {t.name for t in found.tensors} | {"output"}
    assert found.first is None and all(t.max_steps == 0 for t in found.tensors)


class Off(nn.Module):
    """A module of which only the logits differ."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x)
        return logits.flip(1)


def test_logits_that_alone_differ_are_the_last_tensor(tmp_path: Path) -> None:
    made = Made(tmp_path / "m.onnx", "plain")
    images = IMAGES[:4].numpy()
    recorded = ConvertedReference(made.converted).integers(images, made.path)
    with torch.no_grad():
        logits = Off(made.converted)(IMAGES[:4]).numpy()
    found = first_divergence(made.path, images, recorded, output=(logits, 0.01))
    assert found.first is not None and found.first.name == "output" and found.operator == "fc/Gemm"
    exact = first_divergence(made.path, images, recorded)
    assert exact.first is None and len(exact.tensors) == len(found.tensors) - 1


def test_what_cannot_be_compared_keeps_the_figures(tmp_path: Path) -> None:
    made = Made(tmp_path / "m.onnx", "plain")
    spoiled: Callable[[], Results] = lambda: made.check(_rescaled(made.converted, "stem_quant"))  # noqa: E731
    assert spoiled().divergence is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ConvertedReference, "integers", lambda *_: {"stem_quant/QuantizeLinear_output": np.zeros(3)}
        )
        results = spoiled()
    assert results.parity is not None and results.divergence is None
    assert results.notes[0].startswith("tensor by tensor: not compared (recorded tensor 'stem_quant")


def test_the_line_of_a_divergence() -> None:
    found = Divergence(1, None, ())
    assert divergence_line(found) == "tensor by tensor: all 0 compared tensors agree within 1 step"
    other = replace(found, reference="the same file without optimizations")
    assert divergence_line(other).endswith("within 1 step, against the same file without optimizations")
