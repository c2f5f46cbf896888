"""Tests of TensorRT's calibration table against each tensor of the float file in ONNX Runtime."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper
from torch import Tensor, nn
from torchvision.models import VisionTransformer, mobilenet_v2, resnet18, shufflenet_v2_x0_5

from qatkit.calibration.cache import table
from qatkit.export.tensorrt_table import split_parts, tensorrt_table
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.simplify import float_baseline
from qatkit.quant.backends import TENSORRT
from qatkit.quant.observers import MinMaxObserver
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.module import QATModule


def vit() -> nn.Module:
    model: nn.Module = VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=10)
    nn.init.normal_(model.get_parameter("heads.head.weight"), std=0.1)
    return model


def ends_in_a_convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1))


class TwoSplits(nn.Module):
    """A model that splits one tensor in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.a, self.b, self.c, self.d = (nn.Conv2d(n, 5, 1) for n in (4, 4, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        (a, b), (c, d) = x.chunk(2, 1), x.split([2, 6], 1)
        return cast(Tensor, self.a(a) + self.b(b) * self.c(c) + self.d(d))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "mobilenet_v2": mobilenet_v2,
    "vit": vit,
    "shufflenet": shufflenet_v2_x0_5,
    "ends in a convolution": ends_in_a_convolution,
    "two splits": TwoSplits,
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) if one == "shufflenet" else one for one in MODELS]
)
def test_every_step_is_the_largest_value_that_the_tensor_takes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    images = torch.randn(4, 3, 32, 32)
    module = QATModule(model, images[:1], backend=TENSORRT, quantizers=Quantizers(observer=MinMaxObserver))
    module.calibrate([images])
    ranges = table(module.graph)
    path = tmp_path / "model.float.onnx"
    export_onnx(float_baseline(model, images), images, path)

    parts = split_parts(module.graph.graph)
    text, missing = tensorrt_table(path, ranges, "8601", parts)
    head, *lines = text.splitlines()
    assert not missing
    assert head == "TRT-8601-EntropyCalibration2"
    steps = {k: struct.unpack(">f", bytes.fromhex(v))[0] for k, v in (line.split(": ") for line in lines)}

    exposed = onnx.load(path)
    known = {value.name for value in exposed.graph.output}
    exposed.graph.output.extend(
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None)
        for n in steps
        if n != "input" and n not in known
    )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    values = dict(zip(names, session.run(names, {"input": images.numpy()}), strict=True)) | {
        "input": images.numpy()
    }
    followed = {n.input[0]: n for n in exposed.graph.node if n.op_type in ("Relu", "Clip")}
    last = {n.name.rpartition("/")[0]: n.output[0] for n in exposed.graph.node} | {"input": "input"}
    last |= {site: f"{last[of][:-1]}{i}" for site, (of, i) in parts.items() if of in last}
    chosen = {last[site]: ends for site, ends in ranges.items()}
    assert len(chosen) == len(ranges) and set(chosen) <= set(steps)
    for tensor, step in steps.items():
        value = np.maximum(values[tensor], 0) if tensor in followed else values[tensor]
        largest = float(np.abs(value).max()) / 127
        if tensor in chosen:
            assert step == pytest.approx(chosen[tensor]["scale"], rel=1e-6)
            # Scales are aligned by a few percent (`qatkit.graph.scales.align`); ReLU6 keeps 0..6.
            assert step == pytest.approx(largest, rel=0.04) or step == pytest.approx(6 / 127, rel=0.04), (
                tensor
            )
        else:
            assert step >= 0.96 * largest, tensor  # a part of a known tensor
