"""Float ONNX files, as teams without the PyTorch code have them: a trained one, and small ones built node by node."""

from __future__ import annotations

import atexit
import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.config.schema import CalibrationConfig, Config, DataConfig, TrainerConfig, VerifyConfig
from qatkit.export.torch_to_onnx import export_onnx


class Digits(nn.Module):
    """A Conv, a depthwise and a pointwise Conv with a residual connection, and two Linears: 170,000 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.depthwise, self.pointwise = nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1)
        self.fc1, self.fc2 = nn.Linear(32 * 16, 320), nn.Linear(320, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        x = F.max_pool2d(F.relu(self.pointwise(F.relu(self.depthwise(x)))) + x, 2)
        return cast(Tensor, self.fc2(F.relu(self.fc1(x.flatten(1)))))


@functools.cache
def digits() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Returns the training images and labels and the test images and labels.

    Images are [N, 3, 8, 8] in -1..1; the split is that of `data=digits` at seed 0.
    """
    bunch = load_digits()
    pixels = np.round(bunch.images * (255 / 16)).astype(np.float32)
    # All in float32: a difference in the last bit can move an activation by a whole step.
    grey = (pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    images = np.repeat(grey[:, None], 3, axis=1)
    parts = train_test_split(images, bunch.target, test_size=0.2, stratify=bunch.target, random_state=0)
    return parts[0], parts[2], parts[1], parts[3]


@functools.cache
def trained() -> Path:
    """Returns a file of `Digits` after a few seconds of training."""
    torch.manual_seed(0)
    model, (images, labels, _, _) = Digits(), digits()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(6):
        for chunk in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(
                model(torch.from_numpy(images[chunk])), torch.from_numpy(labels[chunk])
            ).backward()
            optimizer.step()
    path = folder() / "trained.onnx"
    export_onnx(model.eval(), torch.from_numpy(images[:2]), path)
    return path


@functools.cache
def folder() -> Path:
    holder = tempfile.TemporaryDirectory()
    atexit.register(holder.cleanup)
    return Path(holder.name)


def logits(
    path: Path, images: NDArray[np.float32], *, optimize: bool = True, entries: dict[str, str] | None = None
) -> NDArray[np.float32]:
    """Returns the file's outputs in ONNX Runtime on one thread.

    The batches have 100 images, since dynamic ranges depend on the batch.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    chunks = [images[start : start + 100] for start in range(0, len(images), 100)]
    return np.concatenate([session.run(None, {name: chunk})[0] for chunk in chunks])


def top1(path: Path, **how: Any) -> float:
    """Returns the top-1 accuracy on the digits' test images in percent."""
    _, _, images, labels = digits()
    return float(100 * (logits(path, images, **how).argmax(1) == labels).mean())


def by_hand(path: Path, opset: int = 13, **changes: Any) -> Path:
    """Writes Conv, ReLU, global pool, Flatten and Gemm with random weights: [N, 3, 8, 8] to 10 logits.

    Args:
        path: file to write.
        opset: opset of the file.
        changes: `shape` of the input, `kind` of its elements, number of `classes`, additional `inputs` and
            `outputs`, `nodes` and `weights` in place of its own, and arguments of onnx.save as `save`.
    """
    draw = np.random.default_rng(0)
    shape, classes = changes.get("shape", ["N", 3, 8, 8]), changes.get("classes", 10)
    channels = shape[1] if len(shape) > 1 and isinstance(shape[1], int) else 3
    weights = changes.get(
        "weights",
        {
            "w": draw.normal(size=(16, channels, 3, 3)),
            "b": draw.normal(size=16),
            "fc": draw.normal(size=(classes, 16)),
        },
    )
    nodes = changes.get(
        "nodes",
        [
            helper.make_node("Conv", ["input", "w", "b"], ["y"], "conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["y"], ["r"], "relu"),
            helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
            helper.make_node("Flatten", ["p"], ["f"], "flatten"),
            helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
        ],
    )
    graph = helper.make_graph(
        nodes,
        "by_hand",
        [
            helper.make_tensor_value_info("input", changes.get("kind", TensorProto.FLOAT), shape),
            *changes.get("inputs", []),
        ],
        [
            helper.make_tensor_value_info("output", TensorProto.FLOAT, ["N", classes]),
            *changes.get("outputs", []),
        ],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6)
    onnx.save(model, str(path), **changes.get("save", {}))
    return path


def settings(path: Path, mode: str, folder: Path, **changes: Any) -> Config:
    """Returns a configuration for the digits at their own 8 x 8 pixels; only the accuracy drop is bounded."""
    config = Config(
        name="file",
        output_dir=str(folder),
        onnx=str(path),
        mode=mode,
        data=DataConfig(image_size=8, workers=0),
        calibration=CalibrationConfig(images=128),
        trainer=TrainerConfig(progress=False),
        verify=VerifyConfig(latency_runs=3, threads=1, audit=False, min_agreement=None),
    )
    return replace(config, **changes)


EXTERNAL = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}


def with_branches(path: Path, *, constant: bool = False) -> Path:
    """Writes a Conv within an If within an If.

    Both conditions are always true (`constant`), or true if the largest input value is not 0.
    """

    def branch(name: str, nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
        )

    relu = {name: helper.make_node("Relu", ["input"], [name], name) for name in ("flat", "else")}
    conv = helper.make_node("Conv", ["input", "w", "b"], ["deep"], "conv", pads=[1, 1, 1, 1])
    inner = helper.make_node("If", ["yes"], ["then"], "inner", then_branch=branch("deep", [conv]),
                             else_branch=branch("flat", [relu["flat"]]))  # fmt: skip
    outer = helper.make_node("If", ["yes"], ["y"], "outer", then_branch=branch("then", [inner]),
                             else_branch=branch("else", [relu["else"]]))  # fmt: skip
    if constant:
        value = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
        condition = [helper.make_node("Constant", [], ["yes"], "yes", value=value)]
    else:
        condition = [
            helper.make_node("ReduceMax", ["input"], ["most"], "most", keepdims=0),
            helper.make_node("Cast", ["most"], ["yes"], "yes", to=TensorProto.BOOL),
        ]
    head = [
        helper.make_node("GlobalAveragePool", ["y"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "fc"], ["output"], "fc", transB=1),
    ]
    return by_hand(path, nodes=[*condition, outer, *head])


def made(mode: str) -> str:
    """Returns the name of the file that export.py writes in a mode."""
    return f"model.{mode}.onnx"
