"""Tests of parity between a file and an independent module in plain torch arithmetic on the same integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from qdq_graphs import INPUT_SCALE, LOGITS_SCALE, OUTPUT_SCALE, QdqGraph, classifier
from torch import fx, nn
from torch.nn import functional as F

from qatkit.config.schema import VerifyConfig
from qatkit.data.inputs import ImageInputs
from qatkit.export.converted_reference import ConvertedReference
from qatkit.records.results import Parity, Results
from qatkit.verify.checks.base import Subject
from qatkit.verify.checks.parity import ParityCheck, in_doubt, parity_lines
from qatkit.verify.divergence import first_divergence
from qatkit.verify.parity import parity
from qatkit_verify.errors import ConfigError
from qatkit_verify.records import Comparison

_RANDOM = torch.Generator().manual_seed(5)
# Each image has its own mean per channel, so that pooled features and classes differ.
IMAGES = torch.randn(64, 16, 8, 8, generator=_RANDOM) + torch.randn(64, 16, 1, 1, generator=_RANDOM)


class Reference(nn.Module):
    """The classifier of `qdq_graphs` in float64 on the file's integers; it records quantizers' outputs."""

    def __init__(self, graph: QdqGraph, output_pair: bool = True) -> None:
        super().__init__()
        self._numbers = {name: torch.as_tensor(value) for name, value in graph.initializers.items()}
        self._output_pair = output_pair
        self.recorded: dict[str, NDArray[Any]] = {}

    def _pair(self, name: str, value: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
        # ONNX Runtime divides in float32 and rounds half to even.
        steps = torch.round(value.float() / torch.tensor(scale)) + zero
        steps = steps.clamp(0, 255)
        self.recorded[f"{name}_out"] = steps.to(torch.uint8).numpy()
        return ((steps - zero) * torch.tensor(scale)).double()

    def _operand(self, name: str) -> torch.Tensor:
        scale = self._numbers[f"{name}_scale"]
        values = self._numbers[f"{name}_q"].double()
        return values * scale.double().reshape(-1, *[1] * (values.ndim - 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        value = self._pair("input_q", image, INPUT_SCALE, 128)
        value = F.conv2d(value, self._operand("conv.weight"), self._operand("conv.bias"), padding=1)
        value = self._pair("relu_q", value.relu(), OUTPUT_SCALE, 0)
        value = self._pair("pool_q", value.mean((2, 3), keepdim=True), 0.03, 0)
        value = self._pair("flat_q", value.flatten(1), 0.03, 0)
        value = F.linear(value, self._operand("fc.weight"), self._operand("fc.bias"))
        return (self._pair("logits_q", value, LOGITS_SCALE, 128) if self._output_pair else value).float()


def test_a_faithful_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    module = Reference(classifier(path))
    result = parity(module, path, torch.split(IMAGES, 20), threads=1)
    assert result.images == 64
    assert result.step == pytest.approx(LOGITS_SCALE)
    assert result.step_source == "the output's quantization scale"
    assert result.unoptimized is not None
    for comparison in (result.unoptimized, result.optimized):  # no difference, with or without fusions
        assert comparison.max_abs == comparison.mean_abs == comparison.max_steps == 0
        assert comparison.agreement == 1
    assert result.agreement == 1


def test_figures_are_those_of_numpy(tmp_path: Path) -> None:
    """The module is off by known amounts: one step everywhere, and flipped signs for a quarter of images."""
    path = tmp_path / "m.onnx"
    classifier(path)

    class Off(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            logits = torch.as_tensor(exact(image)) + LOGITS_SCALE
            logits[:16] = -logits[:16]
            return logits

    def exact(image: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(ort.InferenceSession(path).run(None, {"input": image.numpy()})[0])

    logits = exact(IMAGES).numpy().astype(np.float64)
    off = Off()(IMAGES).numpy()
    result = parity(Off(), path, [IMAGES], threads=1).unoptimized
    assert result is not None
    assert result.max_abs == pytest.approx(np.abs(off - logits).max())
    assert result.mean_abs == pytest.approx(np.abs(off - logits).mean())
    assert result.max_steps == pytest.approx(result.max_abs / LOGITS_SCALE, rel=1e-5)
    assert result.agreement == (off.argmax(1) == logits.argmax(1)).mean() < 1


def test_a_float_output_is_measured_in_a_stated_proxy(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    module = Reference(classifier(path, output_pair=False), output_pair=False)
    result = parity(module, path, [(IMAGES, torch.zeros(64))], threads=1)
    logits = module(IMAGES)
    assert result.step == pytest.approx(float(logits.max() - logits.min()) / 255)
    assert "range of the converted module's logits / 255" in result.step_source


def test_a_tie_of_float_logits_is_told_and_no_shortfall(tmp_path: Path) -> None:
    """Another class wins by a tenth of a step, which is a tie, or by 0.9 steps, which is not."""
    path = tmp_path / "m.onnx"
    module = Reference(classifier(path, output_pair=False), output_pair=False)
    logits = module(IMAGES)
    step = float(logits.max() - logits.min()) / 255

    class Nudged(nn.Module):
        def __init__(self, steps: float) -> None:
            super().__init__()
            self.steps = steps

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            found = torch.as_tensor(module(image))
            best, second = found.topk(2, dim=1).indices[:3].unbind(1)
            rows = torch.arange(3)
            found[rows, second] = found[rows, best] + self.steps * step
            return found

    for steps, held in ((0.1, 1.0), (0.9, 61 / 64)):
        result = parity(Nudged(steps), path, [IMAGES], threads=1)
        assert result.agreement == 61 / 64 and result.held == pytest.approx(held)
        results = Results("n", "m", "out", parity=result)
        short = ParityCheck().shortfalls(VerifyConfig(min_agreement=0.999), results)
        told = "verify.min_agreement=0.999: ONNX Runtime agrees with the converted module on 95.31 % of 64 images"
        assert [one.line for one in short] == ([] if held == 1 else [told])
        text = "95.31 % (100.00 % except for ties)" if held == 1 else "95.31 %, difference"
        assert text in parity_lines(result)[1]


def test_no_divergence_in_a_faithful_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    module = Reference(classifier(path))
    module(IMAGES)
    result = first_divergence(path, IMAGES, module.recorded, threads=1)
    assert result.first is None
    assert [tensor.name for tensor in result.tensors] == [
        f"{name}_out" for name in ("input_q", "relu_q", "pool_q", "flat_q", "logits_q")
    ]
    assert result.tensors[0].mismatching == 0
    assert result.tensors[0].elements == IMAGES.numel()
    assert result.not_recorded == result.not_in_file == ()


@pytest.mark.parametrize(
    ("weight", "tensor"), [("conv.weight_q", "relu_q_out"), ("fc.weight_q", "logits_q_out")]
)
def test_the_first_diverging_tensor_is_named(weight: str, tensor: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    module = Reference(classifier(path))
    model = onnx.load(str(path))
    for initializer in model.graph.initializer:
        if initializer.name == weight:
            values = numpy_helper.to_array(initializer).copy()
            values[0] = -values[0]  # the first output channel
            initializer.CopyFrom(numpy_helper.from_array(values, weight))
    onnx.save(model, str(path))
    module(IMAGES)
    result = first_divergence(path, IMAGES, module.recorded, threads=1)
    assert result.first is not None
    assert result.first.name == tensor
    channels = 16 if "conv" in weight else 10
    assert 0 < result.first.mismatching <= 1.02 / channels
    assert result.first.max_steps > 5


def test_recorded_tensors_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    module = Reference(classifier(path))
    module(IMAGES)
    some = {"relu_q_out": module.recorded["relu_q_out"], "other": np.zeros(3, np.uint8)}
    result = first_divergence(path, IMAGES, some, threads=1)
    assert result.not_in_file == ("other",)
    assert "input_q_out" in result.not_recorded
    flat = {"relu_q_out": some["relu_q_out"].reshape(64, -1)}
    assert first_divergence(path, IMAGES, flat, threads=1).first is None
    with pytest.raises(ConfigError, match="expected integer"):
        first_divergence(path, IMAGES, {"relu_q_out": some["relu_q_out"].astype(np.float32)})
    with pytest.raises(ConfigError, match="as many values as in the file"):
        first_divergence(path, IMAGES, {"relu_q_out": np.zeros(3, np.uint8)})
    with pytest.raises(ConfigError, match="expected names of quantized tensors"):
        first_divergence(path, IMAGES, {"other": np.zeros(3, np.uint8)})


def test_parity_needs_images(tmp_path: Path) -> None:
    module = Reference(classifier(tmp_path / "m.onnx"))
    with pytest.raises(ConfigError, match=r"verify\.parity_images=0"):
        parity(module, tmp_path / "m.onnx", [])


def _differing(count: int, images: int) -> Parity:
    same = Comparison(1 - count / images, 0, 0, 0, 0)
    return Parity(images, 0.1, "a step", Comparison(1.0, 0, 0, 0, 0), same)


@pytest.mark.parametrize(
    ("images", "least"), [(64, 0.98), (512, 0.999), (512, 0.99), (10_000, 0.999), (300, 0.5)]
)
def test_a_file_is_in_doubt_where_chance_does_as_much(images: int, least: float) -> None:
    """Compares with 40,000 random samples of a file that just meets the bound."""
    drawn = np.random.default_rng(0).binomial(images, 1 - least, 40_000)
    for count in range(int(images * (1 - least)) + 1, images, max(1, images // 500)):
        share = float((drawn >= count).mean())
        if abs(share - 0.05) > 0.005:
            assert in_doubt(_differing(count, images), least) == (share > 0.05)
    assert not in_doubt(_differing(1, images), 1.0) and not in_doubt(_differing(0, images), least)


@pytest.mark.parametrize(("nudged", "everywhere", "images", "kept"), [
    (2, False, 512, True), (2, True, 512, False), (20, True, 64, False), (1, True, 64, True)
])  # fmt: skip
def test_more_images_decide_where_few_cannot(
    nudged: int, everywhere: bool, images: int, kept: bool, tmp_path: Path
) -> None:
    """The decision differs for `nudged` of 64 images (with a dark pixel), in one or all of eight batches."""
    path = tmp_path / "m.onnx"
    written = Reference(classifier(path, output_pair=False), output_pair=False)
    marked = IMAGES.clone()
    marked[:nudged, 0, 0, 0] = -1000.0

    class Nudged(nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            found = written(image)
            rows = torch.nonzero(image[:, 0, 0, 0] == -1000.0).flatten()
            found[rows, found[rows].argmin(1)] = found.max() + 10
            return torch.as_tensor(found)

    later = marked if everywhere else IMAGES
    subject = Subject(
        folder=tmp_path,
        files={"float": path, "int8": path},
        batches=lambda: [(batch, torch.zeros(64)) for batch in (marked, *[later] * 7)],
        timed=ImageInputs((16, 8, 8)).timed,
        settings=VerifyConfig(min_agreement=0.98, parity_images=64, threads=1),
        reference=ConvertedReference(cast("fx.GraphModule", Nudged())),
    )
    results = ParityCheck().measure(subject, Results("n", "m", "out"))
    assert results.parity is not None and results.parity.images == images
    assert (ParityCheck().shortfalls(subject.settings, results) == []) == kept
    note = f"parity: the decision differs for {nudged} of the first 64 images, too few to judge"
    assert any(one.startswith(note) for one in results.notes) == (images == 512)
