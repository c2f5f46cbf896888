"""Tests of padding: zero padding joins the file's convolutions; any other Pad runs in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from chain import Shipped, noise, run_ort, run_torch, settle, ship
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.graph.fuse import fuse
from qatkit.quant.backends import TENSORRT
from qatkit.verify.audit import audit

IMAGES = noise(8, 3, 12, 12)


class Same(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding, as in the package of EfficientNet-Lite."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride, groups=groups, bias=False)
        self.static_padding = nn.ZeroPad2d((0, 1, 0, 1)) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.static_padding(x)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Lite(nn.Module):
    """SAME convolutions with BatchNorms and ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.bn1 = Same(3, 8, 2), nn.BatchNorm2d(8)
        self.depthwise, self.bn2 = Same(8, 8, 1, groups=8), nn.BatchNorm2d(8)
        self.last, self.bn3, self.fc = Same(8, 16, 2), nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.stem(x)))
        x = F.relu6(self.bn2(self.depthwise(x)))
        x = F.relu6(self.bn3(self.last(x)))
        return cast(Tensor, self.fc(x.mean((2, 3))))


class TwoReaders(nn.Module):
    """A padded tensor that is read by a convolution and by a pool."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.pool, self.mode = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 8, 3),
            nn.MaxPool2d(2),
            mode,
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(F.relu(self.first(x)), (0, 1, 1, 1), mode=self.mode)
        return cast(Tensor, self.second(x).mean((2, 3)) + self.pool(x).mean((2, 3)))


class Padded(nn.Module):
    """Two convolutions that have their own padding, or that follow a padding module."""

    def __init__(self, before: nn.Module | None = None, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = before or nn.Identity()
        self.first, self.second = nn.Conv2d(3, 8, 3, **settings), nn.Conv2d(8, 8, 4, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.second(F.relu(self.first(self.before(x)))))


def check(done: Shipped) -> list[onnx.NodeProto]:
    """Checks that the file agrees with the module and is near the float model; returns its Pad nodes."""
    plain = run_ort(done.path, done.images, optimize=False)
    np.testing.assert_allclose(plain, run_ort(done.path, done.images), atol=1e-6)
    np.testing.assert_allclose(plain, run_torch(done.converted, done.images), atol=1e-6)
    wanted = run_torch(done.model, done.images)
    assert np.square(plain - wanted).mean() < 2e-3 * np.square(wanted).mean()
    return [n for n in onnx.load(done.path).graph.node if n.op_type == "Pad"]


def reads_bytes(path: Path, pad: onnx.NodeProto) -> bool:
    makers = {o: n for n in onnx.load(path).graph.node for o in n.output}
    return bool(makers[pad.input[0]].op_type == "QuantizeLinear")


def test_same_convolutions_hold_their_asymmetric_pads() -> None:
    done = ship(settle(Lite(), 3, 12, 12), IMAGES, "lite")
    assert check(done) == [] and audit(done.path).int8_share == 1
    nodes = [n for n in onnx.load(done.path).graph.node if n.op_type == "Conv"]
    pads = [list(a.ints) for n in nodes for a in n.attribute if a.name == "pads"]
    assert pads == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1]]
    assert [n.name.split("/")[0] for n in nodes] == ["stem", "depthwise", "last"]


def test_of_a_fixed_batch_too(tmp_path: Path) -> None:
    done = ship(settle(Lite(), 3, 12, 12), IMAGES, "lite")
    export_onnx(done.converted, IMAGES, tmp_path / "fixed.onnx", dynamic_batch=False)
    assert "Pad" not in {n.op_type for n in onnx.load(tmp_path / "fixed.onnx").graph.node}
    np.testing.assert_array_equal(run_ort(tmp_path / "fixed.onnx", IMAGES), run_ort(done.path, IMAGES))


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_float_baseline_has_no_pad_either(dynamic: bool, tmp_path: Path) -> None:
    model = settle(Lite(), 3, 12, 12)
    export_onnx(float_baseline(model, IMAGES[:2]), IMAGES, tmp_path / "float.onnx", dynamic_batch=dynamic)
    assert "Pad" not in {n.op_type for n in onnx.load(tmp_path / "float.onnx").graph.node}
    np.testing.assert_allclose(run_ort(tmp_path / "float.onnx", IMAGES), run_torch(model, IMAGES), atol=1e-5)


@pytest.mark.parametrize("mode", ["constant", pytest.param("reflect", marks=pytest.mark.slow)])
def test_a_pad_with_another_reader_runs_on_bytes(mode: str) -> None:
    done = ship(TwoReaders(mode).eval(), IMAGES, f"readers_{mode}")
    (pad,) = check(done)
    assert reads_bytes(done.path, pad) and audit(done.path).int8_share == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("reflect", {"padding": 1, "padding_mode": "reflect"}),
        pytest.param("replicate", {"padding": 1, "padding_mode": "replicate"}, marks=pytest.mark.slow),
        pytest.param("circular", {"padding": 1, "padding_mode": "circular"}, marks=pytest.mark.slow),
        pytest.param("same", {"padding": "same"}, marks=pytest.mark.slow),
        pytest.param("reflect same", {"padding": "same", "padding_mode": "reflect"}, marks=pytest.mark.slow),
        pytest.param("module", {"before": nn.ReflectionPad2d(2)}, marks=pytest.mark.slow),
        pytest.param("filled", {"before": nn.ConstantPad2d(2, 0.7)}, marks=pytest.mark.slow),
    ],
)
def test_other_paddings_are_right_and_keep_convolutions_int8(name: str, settings: dict[str, Any]) -> None:
    done = ship(Padded(**settings).eval(), IMAGES, f"padded_{name.replace(' ', '_')}")
    pads = check(done)
    assert audit(done.path).int8_share == 1
    if "reflect" in name or name in ("replicate", "module"):
        assert pads and all(reads_bytes(done.path, pad) for pad in pads)


def test_fuse_opens_what_pads_and_trains_through_it() -> None:
    model = Padded(nn.ReplicationPad2d(1), padding=1, padding_mode="reflect")
    graph = fuse(model, IMAGES[:2]).graph
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"].count(F.pad) == 3
    torch.testing.assert_close(graph(IMAGES), model(IMAGES), rtol=1e-5, atol=1e-5)
    graph(IMAGES).sum().backward()
    assert all(p.grad is not None for p in graph.parameters())


def test_another_runtime_gets_no_padding_of_bytes() -> None:
    done = ship(TwoReaders("constant").eval(), IMAGES, "readers_tensorrt", backend=TENSORRT)
    assert not any(reads_bytes(done.path, n) for n in onnx.load(done.path).graph.node if n.op_type == "Pad")
