"""Tests of the tournament of calibration methods.

On held-out images its winner is never worse than min-max, and outliers cost it little accuracy.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime as ort
import pytest
import torch
from chain import noise
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.calibration.candidates import METHODS, MIXED
from qatkit.choose.judge import Runtime
from qatkit.choose.tournament import FINALISTS, least_error, tournament
from qatkit.choose.verdict import Verdict
from qatkit.config.schema import ExportConfig, OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx, may_be_literals, refill
from qatkit.quant.observers import MinMaxObserver, MSEObserver
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.module import QATModule

RUNTIME = Runtime(ExportConfig(), {}, 1, False)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns images [N, 1, 8, 8] in -1..1 and labels: 1,437 for training, 360 for testing."""
    bunch = load_digits()
    images = torch.from_numpy((bunch.images[:, None] / 8 - 1).astype(np.float32))
    parts = train_test_split(
        images.numpy(), bunch.target, test_size=0.2, stratify=bunch.target, random_state=0
    )
    x, test_x, y, test_y = (torch.from_numpy(part) for part in parts)
    return x, y, test_x, test_y


class Net(nn.Module):
    """Two convolutions and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.fc = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return cast(Tensor, self.fc(F.max_pool2d(x, 2).flatten(1)))


def trained(x: Tensor, y: Tensor) -> Net:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(300):
        pick = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(net(x[pick]), y[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def plant(net: Net, x: Tensor) -> None:
    """Makes channel 0 of conv1 fire (up to 2,000) for one in 3,000 patches, and conv2 ignore it."""
    with torch.no_grad():
        sums = F.conv2d(x, torch.ones(1, 1, 3, 3), padding=1)
        threshold = sums.flatten().kthvalue(int(sums.numel() * (1 - 1 / 3000))).values
        gain = 2000 / (sums.max() - threshold)
        net.conv1.weight[0], net.conv1.bias[0] = gain, -gain * threshold  # type: ignore[index]
        net.conv2.weight[:, 0] = 0


def accuracy(path: Path, x: Tensor, y: Tensor) -> float:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    scores = session.run(None, {"input": x.numpy()})[0]
    return 100 * float((scores.argmax(1) == y.numpy()).mean())


def test_outliers_cost_min_max_accuracy_but_not_the_winner(tmp_path: Path) -> None:
    x, y, test_x, test_y = digits()
    net = trained(x, y)
    plant(net, x)
    fitted, held_out = x[:384], [(x[384:512], y[384:512])]
    module = QATModule(net, x[:2], quantizers=Quantizers(observer=MSEObserver))
    module.mixed_scales = "report"  # otherwise tensors with outliers stay float and lose nothing
    module.calibrate([fitted])
    rows = {
        row.method: row for row in tournament(module.graph, x[:2], [(fitted, y[:384])], held_out, RUNTIME)
    }
    export_onnx(module.convert().graph, x[:2], tmp_path / "winner.onnx")

    plain = QATModule(net, x[:2], quantizers=Quantizers(observer=MinMaxObserver))
    plain.mixed_scales = "report"
    plain.calibrate([fitted])
    export_onnx(plain.convert().graph, x[:2], tmp_path / "min_max.onnx")

    with torch.no_grad():
        reached = 100 * float((net(test_x).argmax(1) == test_y).float().mean())
    lost = reached - accuracy(tmp_path / "min_max.onnx", test_x, test_y)
    won = accuracy(tmp_path / "winner.onnx", test_x, test_y) - (reached - lost)
    assert lost > 10 and won >= 0.9 * lost

    assert rows.keys() == {*METHODS, MIXED} and sum(row.chosen for row in rows.values()) == 1
    winner = next(row for row in rows.values() if row.chosen)
    assert winner.score is not None and rows["min-max"].score is not None
    assert winner.score >= rows["min-max"].score
    assert accuracy(tmp_path / "winner.onnx", *held_out[0]) == winner.score
    assert accuracy(tmp_path / "min_max.onnx", *held_out[0]) == rows["min-max"].score


def test_a_method_whose_scales_have_another_shape_competes_too() -> None:
    """The weight has one scale, and the bias fits int32 only with the large scale of min-max."""
    x, y, _, _ = digits()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    with torch.no_grad():
        net.get_parameter("1.bias")[3] = -1e6
        net.get_parameter("1.weight")[:, 0] = 0  # the outlier pixel is ignored
    x[300, 0, 0, 0] = 1e4
    overrides = {"1": OverrideConfig(weight_granularity="per_tensor")}
    module = QATModule(net, x[:2], overrides=overrides, quantizers=Quantizers(observer=MSEObserver))
    module.calibrate([x[:384]])
    graph = module.graph
    rows = tournament(graph, x[:2], [(x[:384], y[:384])], [(x[384:512], y[384:512])], RUNTIME)
    figures = {row.method: row.logit_error for row in rows if row.logit_error is not None}
    assert len(figures) == 2 + FINALISTS
    assert figures["percentile 99.99"] < 0.1 * figures["min-max"]


def row(method: str, top1: int, error: float) -> tuple[str, Verdict]:
    """Returns the verdict of a method on 100 images."""
    return method, Verdict(np.arange(100) < top1, np.ones(100, bool), np.full(100, error))


@pytest.mark.parametrize(
    ("rows", "winner"),
    [
        ([row("min-max", 80, 0.5), row("a", 81, 0.2), row("b", 80, 0.1)], "b"),  # one image in 100 is chance
        ([row("min-max", 80, 0.5), row("a", 95, 0.4), row("b", 80, 0.1)], "a"),  # fifteen are not
        ([row("min-max", 80, 0.5), row("a", 79, 0.1), row("b", 78, 0.1)], "min-max"),  # never worse
        ([row("min-max", 80, 0.5), row("a", 80, 0.1005), row("mix", 80, 0.1)], "a"),  # 0.5 % is no gain
        ([row("min-max", 80, math.nan), row("a", 80, 0.2)], "a"),
    ],
    ids=["chance", "better", "never worse", "equal", "no figure"],
)
def test_the_least_error_of_the_logits_wins_among_equals(
    rows: list[tuple[str, Verdict]], winner: str
) -> None:
    assert least_error(dict(rows))[0] == winner


def test_a_refilled_template_is_the_exported_file(tmp_path: Path) -> None:
    """Outputs must be equal bit for bit, with and without graph optimizations."""
    torch.manual_seed(0)
    net = Net()
    x = noise(16, 1, 8, 8)
    files = {}
    for name, images in (("first", x), ("second", 3 * x + 1)):
        module = QATModule(net, x[:2], quantizers=Quantizers(observer=MinMaxObserver))
        module.calibrate([images])
        files[name] = module.convert().graph
    export_onnx(files["first"], x[:2], tmp_path / "template.onnx", template=True)
    first = may_be_literals(files["first"])
    refill(tmp_path / "template.onnx", files["second"], tmp_path / "refilled.onnx", first)
    export_onnx(files["second"], x[:2], tmp_path / "exported.onnx")
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        outputs = [
            ort.InferenceSession(
                str(tmp_path / f"{name}.onnx"), options, providers=["CPUExecutionProvider"]
            ).run(None, {"input": (3 * x).numpy()})[0]
            for name in ("refilled", "exported", "template")
        ]
        np.testing.assert_array_equal(outputs[0], outputs[1])
        assert (outputs[0] != outputs[2]).any()


def test_logits_that_are_all_equal_give_no_error_of_logits(tmp_path: Path) -> None:
    x, y, _, _ = digits()
    net = Net().eval()
    last = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    module = QATModule(net, x[:2], quantizers=Quantizers(observer=MSEObserver))
    module.calibrate([x[:64]])
    rows = tournament(module.graph, x[:2], [(x[:64], y[:64])], [(x[64:96], y[64:96])], RUNTIME)
    assert sum(row.chosen for row in rows) == 1 and all(row.logit_error is None for row in rows)
