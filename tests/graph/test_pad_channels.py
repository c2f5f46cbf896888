"""Tests of padding with channels of zeros: which tensors are padded, and that no result changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from chain import calibrated, noise, run_ort, run_torch, settle
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qatkit.analysis.runtime_tensors import RuntimeTensors, compared_with_file
from qatkit.config.schema import OverrideConfig
from qatkit.export.add_integer_ends import to_integer_io
from qatkit.export.converted_reference import ConvertedReference
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.integer_modules import Quantized
from qatkit.graph.convert.to_integers import convert
from qatkit.quant.backends import FBGEMM, QNNPACK, TENSORRT, Backend
from qatkit.quant.granularity import PerTensor
from qatkit.verify.profile import run_optimized

PER_TENSOR = dataclasses.replace(FBGEMM, weight=dataclasses.replace(FBGEMM.weight, granularity=PerTensor()))
Sizes = dict[str, tuple[int, ...]]


class Case(NamedTuple):
    """A network that is converted and exported with and without padded channels.

    `graph` is the graph before conversion, and `want` the expected result of `widened`.
    """

    graph: fx.GraphModule
    padded: fx.GraphModule
    plain: fx.GraphModule
    padded_file: Path
    plain_file: Path
    images: Tensor
    want: Sizes


class Inverted(nn.Module):
    """MobileNetV3's block: stem, expansion to 28 channels, depthwise convolution, gate and projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.expand, self.bn2 = nn.Conv2d(16, 28, 1, bias=False), nn.BatchNorm2d(28)
        self.depthwise, self.bn3 = nn.Conv2d(28, 28, 5, 2, 2, groups=28, bias=False), nn.BatchNorm2d(28)
        self.pool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), nn.Conv2d(28, 8, 1), nn.Conv2d(8, 28, 1)
        self.project, self.fc = nn.Conv2d(28, 12, 1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn1(self.stem(x)))
        x = F.relu(self.bn3(self.depthwise(F.hardswish(self.bn2(self.expand(x))))))
        x = x * F.hardsigmoid(self.fc2(F.relu(self.fc1(self.pool(x)))))
        return cast(Tensor, self.fc(self.pool(self.project(x)).flatten(1)))


class Stream(nn.Module):
    """A residual stream of 18 channels, as in HRNet, with SAME and reflection padding, and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.around, self.stem = nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(1, 18, 3, 2)
        self.second, self.bn = nn.Conv2d(18, 18, 3, padding=1, bias=False), nn.BatchNorm2d(18)
        self.third = nn.Conv2d(18, 18, 3, padding=1, padding_mode="reflect")
        self.last, self.act = nn.Conv2d(18, 7, 1), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(self.around(x)))
        x = F.max_pool2d(F.relu(x + self.bn(self.second(x))), 2)
        return cast(Tensor, self.last(F.avg_pool2d(self.act(x + self.third(x)), 2)).mean((2, 3)))


class Around(nn.Module):
    """A depthwise convolution between two others; `what` names an additional use of its output."""

    def __init__(self, what: str = "", inner: int = 28) -> None:
        super().__init__()
        self.what = what
        self.first, self.depthwise = nn.Conv2d(4, inner, 1), nn.Conv2d(inner, inner, 3, groups=inner)
        self.last, self.other = nn.Conv2d(inner, 8, 1), nn.Conv2d(4, inner, 1)
        self.grouped, self.fc = nn.Conv2d(inner, 8, 1, groups=4), nn.Linear(inner, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.depthwise(F.relu(self.first(x)))
        z = self.last(y)
        if self.what == "output":
            return z, y
        if self.what == "cat":
            return z, self.last(torch.cat([y[:, :14], y[:, 14:]], 1))
        if self.what == "linear":
            return z, self.fc(y.mean((2, 3)))
        if self.what == "grouped":
            return z, self.grouped(y)
        if self.what == "sum with a partner":
            return cast(Tensor, z + self.last(y + self.other(x[..., 1:-1, 1:-1])))
        if self.what == "sum with the image":
            return cast(Tensor, z + self.last(y + x[:, :1, 1:-1, 1:-1]))
        return cast(Tensor, z)


class Tied(nn.Module):
    """A convolution of 18 channels that is called twice; its second result may be the model's output."""

    def __init__(self, output: bool) -> None:
        super().__init__()
        self.first, self.both, self.last = nn.Conv2d(4, 18, 1), nn.Conv2d(18, 18, 3), nn.Conv2d(18, 4, 1)
        self.output = output

    def forward(self, x: Tensor) -> Tensor:
        x = self.both(F.relu(self.both(F.relu(self.first(x)))))
        return x if self.output else cast(Tensor, self.last(F.relu(x)))


def both_ways(
    model: nn.Module, images: Tensor, backend: Backend = FBGEMM, floats: str = ""
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the graph converted with and without padded channels, from one calibration."""
    overrides = {floats: OverrideConfig(float=True)} if floats else None
    return converted_both(calibrated(model, images, backend, overrides))


def converted_both(graph: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    padded, backend = convert(graph).graph, graph.meta["backend"]
    graph.meta["backend"] = dataclasses.replace(backend, channel_multiples={})
    plain = convert(graph).graph
    graph.meta["backend"] = backend
    return padded, plain


def widened(padded: fx.GraphModule, plain: fx.GraphModule) -> Sizes:
    """Returns the numbers of output and input channels of each padded weight, by path."""
    sizes = {}
    for path, module in padded.named_modules():
        if isinstance(module, Quantized):
            before = plain.get_submodule(path)
            assert isinstance(before, Quantized)
            if module.weight.shape != before.weight.shape:
                sizes[path] = tuple(module.weight.shape[:2])
    return sizes


def drawn(model: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    """Returns the model with random weights and realistic statistics, and images to calibrate it with."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.3)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.5)
    return settle(model, *shape), noise(8, *shape)


INVERTED: Sizes = {
    "stem": (16, 4), "expand": (32, 16), "depthwise": (32, 1), "fc1": (8, 32), "fc2": (32, 8), "project": (12, 32),
}  # fmt: skip
STREAM: Sizes = {"stem": (20, 1), "second": (20, 20), "third": (20, 20), "last": (7, 20)}


@pytest.fixture(scope="module", params=["depthwise", "sums"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    inverted = request.param == "depthwise"
    want = INVERTED if inverted else STREAM
    model, images = drawn(Inverted(), 3, 32, 32) if inverted else drawn(Stream(), 1, 32, 32)
    graph = calibrated(model, images)
    padded, plain = converted_both(graph)
    files = [tmp_path_factory.mktemp(request.param) / f"{name}.onnx" for name in ("padded", "plain")]
    for module, file in zip((padded, plain), files, strict=True):
        export_onnx(module, images[:2], file)
    return Case(graph, padded, plain, files[0], files[1], images, want)


def test_wider_modules_and_files_compute_the_same_numbers(case: Case) -> None:
    assert widened(case.padded, case.plain) == case.want
    others = noise(*case.images.shape, seed=5)
    want = run_torch(case.plain, others)
    assert want.std() > 0.1
    np.testing.assert_array_equal(run_torch(case.padded, others), want)
    np.testing.assert_array_equal(run_ort(case.padded_file, others), want)
    np.testing.assert_array_equal(run_ort(case.plain_file, others), want)
    got, same = (run_ort(file, others, optimize=False) for file in (case.padded_file, case.plain_file))
    np.testing.assert_array_equal(got, same)


def test_an_image_is_padded_as_bytes(case: Case) -> None:
    """An RGB image is padded after its QuantizeLinear, before the layout changes; a grey one is not."""
    optimized = run_optimized(case.padded_file)
    pads = [node for node in optimized.graph if node.op_type == "Pad" and "input" in str(node.name)]
    assert len(pads) == (1 if case.images.shape[1] == 3 else 0)
    for pad in pads:
        kernel = optimized.kernels[str(pad.name)]
        assert kernel.input_types[0] == "uint8" and kernel.output_shapes[0] == (1, 4, 32, 32)
        assert cast(ir.Node, cast(ir.Value, pad.inputs[0]).producer()).op_type == "QuantizeLinear"
        assert len(optimized.graph) == len(run_optimized(case.plain_file).graph) + 1


def test_the_analysis_finds_every_tensor_and_nothing_else(case: Case) -> None:
    """Tensors are found by name, with the same metrics as in the file without padded channels."""
    found = []
    for module, file in ((case.padded, case.padded_file), (case.plain, case.plain_file)):
        runtime = RuntimeTensors(file, ConvertedReference(module), threads=1)
        found.append(compared_with_file(case.graph, runtime, [case.images]))
    assert found[0].first is None and found[0].notes == []
    rows = {row.site: row.runtime for row in found[0].rows if row.runtime is not None}
    assert len(rows) > 5 and "input" in rows
    assert rows == {row.site: row.runtime for row in found[1].rows if row.runtime is not None}


def test_pixels_are_padded_behind_their_normalisation(case: Case, tmp_path: Path) -> None:
    channels, found = case.images.shape[1], []
    pixels = torch.randint(0, 256, (4, channels, 32, 32), generator=torch.Generator().manual_seed(2))
    for file in (case.padded_file, case.plain_file):
        ends = (0.5, 0.4, 0.3)[:channels], (0.2, 0.3, 0.4)[:channels]
        to_integer_io(file, tmp_path / file.name, *ends, (-3.0, 3.0))
        found.append(run_ort(tmp_path / file.name, pixels.to(torch.uint8)))
    np.testing.assert_array_equal(found[0], found[1])
    assert len(np.unique(found[0])) > 4


def test_one_scale_a_tensor_serves_zeros_as_well() -> None:
    model, images = drawn(Inverted(), 3, 32, 32)
    padded, plain = both_ways(model, images, PER_TENSOR)
    assert widened(padded, plain) == INVERTED
    np.testing.assert_array_equal(run_torch(padded, images), run_torch(plain, images))


@pytest.mark.parametrize(
    ("model", "floats"),
    [
        (Around("output"), ""),
        (Around("cat"), ""),
        (Around("linear"), ""),
        (Around("grouped"), ""),
        (Around("sum with the image"), ""),
        (Around(inner=20), ""),
        (Around(), "depthwise"),
        (Around(), "first"),
        (Around(), "last"),
        (Tied(output=True), ""),
    ],
    ids=[
        "output", "cat", "linear", "grouped", "broadcast", "more than a third", "float depthwise", "float maker",
        "float reader", "tied to another",
    ],
)  # fmt: skip
def test_channels_that_others_read_stay(model: nn.Module, floats: str) -> None:
    model, images = drawn(model, 4, 12, 12)
    assert widened(*both_ways(model, images, floats=floats)) == {}


def test_partners_of_a_sum_are_widened_together() -> None:
    model, images = drawn(Around("sum with a partner"), 4, 12, 12)
    padded, plain = both_ways(model, images)
    assert set(widened(padded, plain).values()) == {(32, 4), (32, 1), (8, 32)}
    np.testing.assert_array_equal(run_torch(padded, images), run_torch(plain, images))


def test_tied_convolutions_stay_one_weight(tmp_path: Path) -> None:
    model, images = drawn(Tied(output=False), 4, 12, 12)
    padded, plain = both_ways(model, images)
    assert set(widened(padded, plain).values()) == {(20, 4), (20, 20), (4, 20)}
    np.testing.assert_array_equal(run_torch(padded, images), run_torch(plain, images))
    export_onnx(padded, images[:2], tmp_path / "model.onnx")
    stored = onnx.load(tmp_path / "model.onnx").graph.initializer
    assert sum(list(tensor.dims) == [20, 20, 3, 3] for tensor in stored) == 1


@pytest.mark.parametrize(
    ("conv", "want"),
    [
        (nn.Conv2d(3, 64, 7, 2), (64, 4)),
        (nn.Conv2d(3, 16, 4, 4), (16, 4)),
        (nn.Conv2d(1, 32, 3), (32, 4)),
        (nn.Conv2d(3, 64, 16, 16), None),
        (nn.Conv2d(1, 64, 7, 2), None),
        (nn.Conv2d(3, 8, 3), None),
        (nn.Conv2d(3, 18, 3), None),
        (nn.Conv2d(4, 16, 3), None),
    ],
    ids=str,
)
def test_images_are_padded_where_it_pays(conv: nn.Conv2d, want: tuple[int, int] | None) -> None:
    found = widened(*both_ways(nn.Sequential(conv), noise(2, conv.in_channels, 32, 32)))
    assert found == ({} if want is None else {"0": want})


class Stems(nn.Module):
    """A convolution of a zero-padded image, and a smaller one that gains nothing from an added channel.

    Args:
        shared: whether the smaller one reads the padded image too, instead of a crop of the image.
    """

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared, self.around = shared, nn.ZeroPad2d((0, 1, 0, 1))
        self.wide, self.narrow = nn.Conv2d(3, 16, 3, 2), nn.Conv2d(3, 8, 3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        padded = self.around(x)
        return self.wide(padded), self.narrow(padded if self.shared else x[..., 1:, 1:])


@pytest.mark.parametrize(("shared", "want"), [(True, {}), (False, {"wide": (16, 4)})])
def test_zeros_around_an_image_belong_to_one_reader(shared: bool, want: Sizes) -> None:
    model, images = drawn(Stems(shared), 3, 16, 16)
    padded, plain = both_ways(model, images)
    assert widened(padded, plain) == want
    for got, same in zip(padded(images), plain(images), strict=True):
        torch.testing.assert_close(got, same, rtol=0, atol=0)


@pytest.mark.parametrize("backend", [QNNPACK, TENSORRT], ids=["qnnpack", "tensorrt"])
def test_other_backends_take_any_number(backend: Backend) -> None:
    model, images = drawn(Inverted(), 3, 32, 32)
    converted = convert(calibrated(model, images, backend)).graph
    assert tuple(cast(Quantized, converted.get_submodule("depthwise")).weight.shape) == (28, 1, 5, 5)
    assert tuple(cast(Quantized, converted.get_submodule("stem")).weight.shape) == (16, 3, 3, 3)
