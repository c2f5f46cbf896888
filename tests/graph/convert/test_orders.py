"""Checks that the converted module orders equal values as the file does, and that faults are still found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import onnx
import pytest
import torch
from chain import calibrated, noise
from onnx import numpy_helper
from torch import Tensor, nn

from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.convert.to_integers import convert
from qatkit.verify.parity import parity

# Functions of scores [N, 40, 30] that return six indices along axis 1: [N, 6, 30].
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda scores: scores.topk(6, 1).indices,
    "topk_least_unsorted": lambda scores: torch.topk(scores, k=6, dim=-2, largest=False, sorted=False)[1],
    "sort_descending": lambda scores: scores.sort(1, True)[1][:, :6],
    "sort_ascending": lambda scores: torch.sort(scores, dim=1).indices[:, :6],
    "argsort": lambda scores: scores.argsort(dim=1, descending=True)[:, :6],
    "kthvalue": lambda scores: torch.cat([scores.kthvalue(k, 1, keepdim=True)[1] for k in range(3, 9)], 1),
    "median": lambda scores: torch.stack([scores[:, k:].median(1).indices for k in range(6)], 1),
    "max": lambda scores: torch.stack([scores[:, k:].max(1)[1] for k in range(6)], 1),
    "argmin": lambda scores: torch.stack([scores[:, k:].argmin(1) for k in range(6)], 1),
}


class ByScore(nn.Module):
    """A model that gathers values by scores, many of which are equal, since they come from a ReLU."""

    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.score, self.value, self.head = nn.Conv1d(8, 40, 1), nn.Conv1d(40, 40, 1), nn.Linear(30, 5)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.relu(self.score(x))
        return cast(Tensor, self.head(self.value(scores).gather(1, self.order(scores))))


@pytest.mark.parametrize("name", ORDERS)
def test_equal_scores_come_in_the_order_of_the_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ByScore(ORDERS[name]).eval()
    images, file = noise(16, 8, 30), tmp_path / "model.onnx"
    converted = convert(calibrated(model, images)).graph
    export_onnx(converted, images[:2], file)
    found = parity(converted, file, [images])
    assert found.unoptimized is not None
    assert max(found.unoptimized.max_steps, found.optimized.max_steps) < 1.01

    model_file = onnx.load(file)
    weight = next(
        one
        for one in model_file.graph.initializer
        if one.data_type == onnx.TensorProto.INT8 and one.dims[:2] == [40, 8]
    )
    values = numpy_helper.to_array(weight).copy()
    values[7] = -values[7]  # the scores of one channel
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model_file, file)
    damaged = parity(converted, file, [images])
    assert damaged.unoptimized is not None
    assert damaged.unoptimized.max_steps > 10
    assert damaged.unoptimized.agreement < 0.97
