"""Tests of torch's operators at opset 13, quantized between two layers: the file is compared with the module.

Operators that cannot be exported give an error of one line; at the opset that this line names, they work.
Several operators share a model, each in a branch with its own Linear, so that a failure names the branch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from chain import calibrated, noise, run_ort, run_torch
from torch import Tensor, fft, nn
from torch.nn import functional as F
from torchvision.ops import deform_conv2d, roi_align

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit_verify.errors import ConfigError

Function = Callable[[Tensor], Tensor]


class Call(nn.Module):
    """A function as a module, with the layers that it needs."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers.values())


class Branches(nn.Module):
    """A first layer and parallel operators, each with its own Linear to 3 values; the results are joined."""

    def __init__(self, operators: dict[str, nn.Module | Function], shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        convs: dict[int, type[nn.Module]] = {3: nn.Conv2d, 4: nn.Conv3d}
        plain = len(shape) == 2 and shape[0] > 4  # steps of a sequence, not channels
        self.first = (
            nn.Linear(shape[1], 8)
            if plain
            else cast(Any, convs.get(len(shape), nn.Conv1d))(shape[0], 4, 3, padding=1)
        )
        self.operators = nn.ModuleDict(
            {name: op if isinstance(op, nn.Module) else Call(op) for name, op in operators.items()}
        )
        self.heads = nn.ModuleDict()
        with torch.no_grad():
            x = self.eval().first(noise(2, *shape))
            for name, operator in self.operators.items():
                self.heads[name] = nn.Linear(operator(x).flatten(1).shape[1], 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.cat(
            [self.heads[name](operator(x).flatten(1)) for name, operator in self.operators.items()], 1
        )


def steps(kind: Callable[..., nn.RNNBase], **options: Any) -> nn.Module:
    """Returns a module that runs a recurrent layer of 5 units on [N, 6, 8], batch first."""
    layer = kind(8, 5, **options)
    if layer.batch_first:
        return Call(lambda x, rnn: rnn(x)[0], rnn=layer)
    return Call(lambda x, rnn: rnn(x.transpose(0, 1))[0].transpose(0, 1), rnn=layer)


def resized(**how: Any) -> Function:
    return lambda x: F.interpolate(x, **how)


def whole(x: Tensor) -> Tensor:
    return (10 * x).long()


def last_state(x: Tensor, rnn: nn.Module) -> Tensor:
    return cast(Tensor, rnn(x)[1][-1])


IMAGE, CLIP, SIGNAL, STEPS = (3, 8, 8), (3, 5, 5, 5), (3, 10), (6, 8)
MASK = torch.ones(8, 8, dtype=torch.bool).tril()
GROUPS: dict[str, tuple[tuple[int, ...], dict[str, nn.Module | Function]]] = {
    "activations": (IMAGE, {
        "mish": nn.Mish(), "rrelu": nn.RReLU(), "prelu": nn.PReLU(4), "elu": nn.ELU(), "celu": nn.CELU(0.7),
        "selu": nn.SELU(), "softplus": nn.Softplus(2.0, 5.0), "softsign": nn.Softsign(), "glu": nn.GLU(1),
        "hardtanh": nn.Hardtanh(-0.5, 2.0), "hardshrink": nn.Hardshrink(), "softshrink": nn.Softshrink(),
        "tanhshrink": nn.Tanhshrink(), "threshold": nn.Threshold(0.1, 0.2), "logsigmoid": nn.LogSigmoid(),
        "hardswish": nn.Hardswish(), "silu": nn.SiLU(), "gelu": nn.GELU("tanh"), "softmin": nn.Softmin(1),
        "logsoftmax": nn.LogSoftmax(1),
    }),
    "norms": (IMAGE, {
        "instance": nn.InstanceNorm2d(4, affine=True), "group": nn.GroupNorm(2, 4), "local": nn.LocalResponseNorm(2),
        "rms": nn.RMSNorm(8), "layer": nn.LayerNorm([4, 8, 8]), "unit": lambda x: F.normalize(x, dim=1),
        "deviation": lambda x: x.std((2, 3)), "norm": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    }),
    "sizes": (IMAGE, {
        "nearest": resized(scale_factor=1.7), "exact": resized(size=[5, 7], mode="nearest-exact"),
        "bilinear": resized(size=[5, 7], mode="bilinear"), "bicubic": resized(scale_factor=2, mode="bicubic"),
        "corners": resized(size=[11, 7], mode="bilinear", align_corners=True),
        "area": resized(size=[5, 3], mode="area"),
        "shuffle": nn.PixelShuffle(2), "unshuffle": nn.PixelUnshuffle(2), "reflect": nn.ReflectionPad2d(2),
        "replicate": nn.ReplicationPad2d((1, 0, 2, 3)), "circular": nn.CircularPad2d(2),
        "pad": nn.ConstantPad2d(2, 0.5),
        "crop": lambda x: F.pad(x, (-1, 2, 0, -1)),
    }),
    "pools": ((3, 10, 10), {
        "adaptive": nn.AdaptiveAvgPool2d(4), "adaptive_max": nn.AdaptiveMaxPool2d((4, 10)), "power": nn.LPPool2d(2, 2),
        "divisor": nn.AvgPool2d(2, divisor_override=3), "ceil": nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        "inner": nn.AvgPool2d(3, 2, 1, count_include_pad=False), "dilated": nn.MaxPool2d(2, 2, dilation=2),
        "divisor_pad": nn.AvgPool2d(3, 2, 1, divisor_override=4), "ceil_bare": nn.AvgPool2d(3, 2, ceil_mode=True),
        "ceil_inner": nn.AvgPool2d((3, 4), 3, 1, ceil_mode=True, count_include_pad=False),
    }),
    "places": (IMAGE, {
        "tril": lambda x: x.tril(), "triu": lambda x: x.triu(2), "mask": lambda x: x.masked_fill(MASK, -1.0),
        "fold": lambda x: F.fold(F.unfold(x, 3, padding=1), (8, 8), 3, padding=1),
        "patches": lambda x: F.fold(F.unfold(x, (2, 4), stride=(2, 4)), (8, 8), (2, 4), stride=(2, 4)),
        "windows": lambda x: x.unfold(2, 3, 2), "roll": lambda x: torch.roll(x, (-1, -2), (2, 3)),
        "flip": lambda x: x.flip(2), "gather": lambda x: x[:, [2, 0, 1]], "shuffle": nn.ChannelShuffle(2),
        "causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "repeat": lambda x: x.repeat_interleave(2, 1), "join": lambda x: torch.cat(x.chunk(3, 2)[::-1], 2),
    }),
    "recurrent": (STEPS, {
        "lstm": steps(nn.LSTM, batch_first=True, bidirectional=True), "gru": steps(nn.GRU),
    }),
    "recurrent_more": (STEPS, {
        "gru": steps(nn.GRU, num_layers=2, bidirectional=True), "plain": steps(nn.LSTM, bias=False),
        "rnn": steps(nn.RNN, batch_first=True, nonlinearity="relu"), "lstm": steps(nn.LSTM, num_layers=2),
        "last": Call(last_state, rnn=nn.GRU(8, 5, batch_first=True)),
    }),
    "integers": (IMAGE, {
        "both": lambda x: ((x > 0) & (x < 1)).float(), "either": lambda x: ((x > 1) | (x < 0)).float(),
        "xor": lambda x: ((x > 0) ^ (x < 1)).float(), "other": lambda x: (~(x > 0)).float(),
        "complement": lambda x: (~whole(x)).float(), "triangle": lambda x: (x > 0).tril().float(),
        "int8": lambda x: (whole(x).to(torch.int8) * 7).float(),
        "uint8": lambda x: (whole(x).to(torch.uint8) + 250).float(),
        "int16": lambda x: (whole(x).to(torch.int16) - 2).float(), "relu": lambda x: F.relu(whole(x).int()).float(),
        "rest": lambda x: (whole(x) % 3).float(), "largest": lambda x: whole(x).amax(1).float(),
        "hot": lambda x: F.one_hot(x.argmax(1), 4).float(), "same": lambda x: (x > 0).type_as(x),
    }),
    "orders": (IMAGE, {
        "sort": lambda x: x.sort(1)[0], "top": lambda x: x.topk(2, 1, largest=False)[0], "sum": lambda x: x.cumsum(1),
        "stable": lambda x: torch.sort(x.round(), dim=1, descending=True, stable=True)[1].float(),
        "median": lambda x: x.median(1)[0], "third": lambda x: x.kthvalue(3, 2, keepdim=True)[0],
        "bucket": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])).float(),
        "search": lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]), x, right=True).float(),
        "fmax": lambda x: torch.fmax(x, -x), "hypot": lambda x: torch.hypot(x, x + 1),
        "distance": lambda x: torch.cdist(x.flatten(2), x.flatten(2) + 1),
        "cross": lambda x: torch.cross(x[:, :3], x[:, 1:], dim=1),
        "cosine": Call(lambda x, f: f(x, x + 1), f=nn.CosineSimilarity(1)),
        "bilinear": Call(lambda x, f: f(x, x + 1), f=nn.Bilinear(8, 8, 3)),
    }),
    "clips": (CLIP, {
        "adaptive": nn.AdaptiveAvgPool3d(3), "adaptive_max": nn.AdaptiveMaxPool3d((3, 1, 5)), "max": nn.MaxPool3d(2),
        "reflect": nn.ReflectionPad3d(2), "replicate": nn.ReplicationPad3d(1), "circular": nn.CircularPad3d(1),
        "trilinear": resized(size=[3, 7, 4], mode="trilinear"), "nearest": resized(scale_factor=2),
        "divisor": nn.AvgPool3d(2, divisor_override=3), "power": nn.LPPool3d(2, 2),
    }),
    "signals": (SIGNAL, {
        "adaptive": nn.AdaptiveAvgPool1d(4), "adaptive_max": nn.AdaptiveMaxPool1d(4), "reflect": nn.ReflectionPad1d(2),
        "replicate": nn.ReplicationPad1d(2), "circular": nn.CircularPad1d(2),
        "linear": resized(scale_factor=2, mode="linear"),
        "power": nn.LPPool1d(2, 2), "average": nn.AvgPool1d(3, 2, 1),
    }),
}  # fmt: skip
SLOW = ("norms", "clips", "signals", "recurrent_more")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in GROUPS]
)
def test_operators_of_a_quantized_model_at_opset_13(name: str, tmp_path: Path) -> None:
    shape, operators = GROUPS[name]
    images, path = noise(4, *shape, seed=1), tmp_path / "model.onnx"
    converted = convert(calibrated(Branches(operators, shape).eval(), images)).graph
    export_onnx(converted, images[:2], path)
    assert onnx.load(str(path)).opset_import[0].version == 13
    expected = run_torch(converted, images)
    for optimize in (False, True):
        found = run_ort(path, images, optimize=optimize)
        for i, branch in enumerate(operators):
            at = slice(3 * i, 3 * i + 3)
            atol = 0.02 * float(np.ptp(expected[:, at])) + 1e-6  # for activations at a tie
            np.testing.assert_allclose(found[:, at], expected[:, at], rtol=0, atol=atol, err_msg=branch)


def grid(x: Tensor) -> Tensor:
    return x[:, :2].permute(0, 2, 3, 1).tanh()


BOXES = torch.tensor([[0, 1.0, 1, 6, 6], [1, 0, 0, 4, 4]])
# Operators that need an opset above 13: function, input shape, reason in the message, lowest opset.
NEWER: dict[str, tuple[Function, tuple[int, ...], str, int]] = {
    "grid_sample": (lambda x: F.grid_sample(x, grid(x), align_corners=False), IMAGE, "this form of GridSample", 16),
    "roi_align": (lambda x: roi_align(x, BOXES, 3, aligned=True), IMAGE, "pixel centres", 16),
    "scatter_add": (lambda x: torch.zeros_like(x).scatter_add(1, x.argmax(1, keepdim=True), x[:, :1]), IMAGE,
                    "reduces while it scatters", 16),
    "fft": (lambda x: fft.rfft2(x).abs(), IMAGE, "this form of DFT", 17),
    "bits": (lambda x: (whole(x) ^ 5).float(), IMAGE, "this form of BitwiseXor", 18),
    "antialias": (resized(size=[5, 5], mode="bilinear", antialias=True), IMAGE, "resizes with antialias", 18),
    "scatter_max": (
        lambda x: torch.zeros_like(x).scatter_reduce(1, x.argmax(1, keepdim=True), x[:, :1], "amax"), IMAGE,
        "takes the max while it scatters", 18,
    ),
    "deform": (lambda x: deform_conv2d(x, x[:, :2].repeat(1, 9, 1, 1), torch.ones(4, 3, 3, 3), padding=1), IMAGE,
               "this form of DeformConv", 19),
    "volumes": (lambda x: F.grid_sample(x, x.permute(0, 2, 3, 4, 1).tanh(), align_corners=False), CLIP,
                "samples volumes", 20),
}  # fmt: skip
QUICK = ("grid_sample", "roi_align", "scatter_add", "antialias")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NEWER]
)
def test_operators_of_a_newer_opset_are_refused_and_work_there(name: str, tmp_path: Path) -> None:
    function, shape, reason, needed = NEWER[name]
    model, images = nn.Sequential(nn.Identity(), Call(function)), noise(3, *shape)
    with pytest.raises(
        ConfigError, match=rf"^export\.opset=13: 1/.*{reason}.* needs opset {needed} or higher$"
    ):
        export_onnx(model, images[:2], tmp_path / "model.onnx")
    export_onnx(model, images[:2], tmp_path / "model.onnx", opset=needed)
    found = run_ort(tmp_path / "model.onnx", images)
    np.testing.assert_allclose(found, run_torch(model, images), rtol=1e-4, atol=1e-5)


class Pooled(nn.Module):
    """A model that returns the indices of an adaptive pool, which no ONNX operator returns."""

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_max_pool2d(x, 3, return_indices=True)[1].float()


class Doubtful(nn.Module):
    """A model with a branch that depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "no form": (
        Call(torch.lgamma),
        r"model\.name=Sequential: in module '1', torch's exporter cannot translate prims\.lgamma\.default to ONNX",
    ),
    "places": (
        Pooled(),
        r"model\.name=Sequential: in module '1', ONNX has no operator for the indices that .*max_pool2d.* returns",
    ),
    "branch": (
        Doubtful(),
        r"model\.name=Sequential: in module '1', torch's exporter failed \(Could not guard on data-dependent .*",
    ),
    "complex": (Call(fft.fft2), r"model\.name=Sequential: in module '1', an output is complex, and ONNX computes .*"),
    "one batch": (
        Call(lambda x: torch.kron(x[:, :, :2, :2], torch.ones(1, 1, 2, 2))),
        r"export\.dynamic_batch=true: an operator of this model works only with batches of 2; set export\.dynamic.*",
    ),
    "projection": (
        Call(last_state, rnn=nn.LSTM(8, 5, proj_size=3)),
        r"model\.name=Sequential: in module '1\.layers\.rnn', this LSTM has proj_size, for which ONNX has no operator",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    module, said = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"^{said}$"):
        export_onnx(nn.Sequential(nn.Identity(), module), noise(2, *IMAGE), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_head_ending_in_argmax_exports_an_integer_output(tmp_path: Path) -> None:
    model, images = nn.Sequential(nn.Conv2d(3, 4, 3), Call(lambda x: x.argmax(1))), noise(3, *IMAGE)
    converted = convert(calibrated(model.eval(), images)).graph
    export_onnx(converted, images[:2], tmp_path / "model.onnx")
    found = run_ort(tmp_path / "model.onnx", images)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, run_torch(converted, images))


def test_two_clamps_of_one_tensor(tmp_path: Path) -> None:
    """Clamps by tensors become Max and Min and then Clips, whose bounds must not share a name."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
            self.register_buffer("low", torch.tensor(-0.5))
            self.register_buffer("high", torch.tensor(0.75))

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  name in the file
            low, high = cast(Tensor, self.low), cast(Tensor, self.high)
            left, right = self.left(input.clamp(low, high)), self.right(input.clamp(low, 2 * high))
            return cast(Tensor, left * right)

    x = noise(8, 8)
    module = calibrated(Clamped().eval(), x)
    converted = convert(module).graph
    export_onnx(converted, x[:2], tmp_path / "clamped.onnx")
    expected = run_torch(converted, x)
    assert np.abs(run_ort(tmp_path / "clamped.onnx", x, optimize=False) - expected).max() < 1e-5
