"""A network with learned quantizers and its images, for the tests of training and of oscillation."""

from __future__ import annotations

from typing import Any

import torch
from chain import noise, settle
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.learned.lsq_plus import LSQPlusFakeQuantize
from qatkit.quant.learned.pact import PACTFakeQuantize
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.module import QATModule

LSQ = Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)
KINDS = {
    "lsq": LSQ,
    "lsq_plus": Quantizers(activation=LSQPlusFakeQuantize, weight=LSQWeightFakeQuantize),
    "pact": Quantizers(activation=PACTFakeQuantize),
}
PLAIN = {"plain": Quantizers()}
INT4 = {"*": OverrideConfig(weight_dtype="int4")}


class Residual(nn.Module):
    """A residual add, a ReLU6, a depthwise convolution and a linear bottleneck: [N, 3, 12, 12] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)
        self.project, self.fc = nn.Conv2d(16, 16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        y = F.relu6(self.bn2(self.depthwise(x)))
        x = self.project(y) + x
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


def module_of(kind: str, **schedule: Any) -> QATModule:
    torch.manual_seed(0)
    wanted = ScheduleConfig(**{"lr": 0.05, "optimizer": "sgd", **schedule})
    model = settle(Residual(), 3, 12, 12)
    module = QATModule(model, noise(2, 3, 12, 12), wanted, quantizers=(KINDS | PLAIN)[kind], overrides=INT4)
    module.calibrate([noise(32, 3, 12, 12)])
    return module


def data() -> DataLoader[tuple[Tensor, ...]]:
    labels = torch.arange(24) % 4
    return DataLoader(TensorDataset(noise(24, 3, 12, 12, seed=5) + labels.view(-1, 1, 1, 1) / 4, labels), 8)
