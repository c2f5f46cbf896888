"""Checks that a settled graph, whose weights are rounded in advance, gives the prepared graph's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from chain import noise, settle
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from qatkit.config.schema import OverrideConfig, ScheduleConfig
from qatkit.graph.phase import inference
from qatkit.graph.precomputed import settled_graph
from qatkit.quant.learned.lsq import LSQFakeQuantize, LSQWeightFakeQuantize
from qatkit.quant.learned.pact import PACTFakeQuantize
from qatkit.quant.weight_fake_quantize import Quantizers, WeightFakeQuantize
from qatkit.train.module import QATModule


class Net(nn.Module):
    """A stem, a depthwise convolution, a residual sum, a computed weight and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)
        self.twice = nn.Conv2d(16, 16, 1)
        self.normed = parametrizations.weight_norm(nn.Conv2d(16, 16, 3, padding=1))
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = F.relu6(self.bn2(self.depthwise(x))) + x
        x = self.normed(self.twice(self.twice(x)))
        result: Tensor = self.fc(x.mean((2, 3)))
        return result


class Tokens(nn.Module):
    """An embedding, attention, an LSTM and a convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(11, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.recurrent, self.conv = nn.LSTM(16, 16, batch_first=True), nn.Conv1d(16, 16, 3, padding=1)
        self.fc = nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.recurrent(x)[0].transpose(1, 2)
        result: Tensor = self.fc(self.conv(x).mean(2))
        return result


LEARNED = Quantizers(activation=LSQFakeQuantize, weight=LSQWeightFakeQuantize)
CASES: dict[str, tuple[Quantizers, ScheduleConfig]] = {
    "plain": (Quantizers(), ScheduleConfig()),
    "a living BatchNorm": (Quantizers(), ScheduleConfig(batch_norm="train")),
    "learned": (LEARNED, ScheduleConfig()),
    "PACT": (Quantizers(activation=PACTFakeQuantize), ScheduleConfig()),
}


def images(count: int = 12) -> Tensor:
    return noise(count, 3, 15, 15)


def prepared(kind: str, *, quantize: bool = True) -> QATModule:
    torch.manual_seed(0)
    quantizers, schedule = CASES[kind]
    override = {"fc": OverrideConfig(float=True)}
    module = QATModule(settle(Net(), 3, 15, 15), images(2), schedule, overrides=override,
                       quantizers=quantizers, quantize=quantize)  # fmt: skip
    module.calibrate([images()])
    module.begin()
    module.ready_to_convert()
    return module


def given_by(graph: Callable[..., Tensor], x: Tensor) -> Tensor:
    with inference(graph), torch.no_grad():  # type: ignore[arg-type]
        return graph(x).clone()


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("quantize", [True, False], ids=["quantized", "control"])
def test_it_gives_what_the_graph_gives(kind: str, quantize: bool) -> None:
    module = prepared(kind, quantize=quantize)
    settled = settled_graph(module.graph)
    torch.testing.assert_close(
        given_by(settled, images()), given_by(module.graph, images()), rtol=1e-5, atol=1e-5
    )
    assert not torch.equal(given_by(settled, images()), given_by(settled, 2 * images()))


def test_settled_weights_are_current_and_the_graph_is_unchanged() -> None:
    module = prepared("a living BatchNorm")
    before = {name: value.clone() for name, value in module.graph.state_dict().items()}
    names = [name for name, _ in module.graph.named_modules()]
    settled = settled_graph(module.graph)
    given = given_by(settled, images())
    assert names == [name for name, _ in module.graph.named_modules()]
    assert all(torch.equal(value, before[name]) for name, value in module.graph.state_dict().items())
    with torch.no_grad():
        for parameter in module.graph.get_submodule("stem").parameters():  # float operators share theirs
            parameter.mul_(1.5)
    assert torch.equal(given_by(settled, images()), given)
    assert not torch.equal(given_by(settled_graph(module.graph), images()), given)


def test_of_other_inputs_and_operators_too() -> None:
    torch.manual_seed(0)
    ids = torch.randint(11, (6, 9))
    module = QATModule(Tokens().eval(), ids[:2])
    module.calibrate([ids])
    module.ready_to_convert()
    torch.testing.assert_close(given_by(settled_graph(module.graph), ids), given_by(module.graph, ids))


class Recurrent(nn.Module):
    """An embedding and a recurrent layer of the given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        made: dict[str, nn.Module] = {
            "lstm": nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True),
            "projected": nn.LSTM(8, 6, batch_first=True, proj_size=4),
            "gru": nn.GRU(8, 6, bias=False, batch_first=True),
            "rnn": nn.RNN(8, 6, batch_first=True, nonlinearity="relu"),
        }
        self.layer = made[kind]

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.layer(self.table(ids))[0])


@pytest.mark.parametrize("kind", ["lstm", "projected", "gru", "rnn"])
def test_recurrent_weights_are_rounded_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ids = torch.randint(11, (6, 9))
    module = QATModule(Recurrent(kind).eval(), ids[:2])
    module.calibrate([ids])
    module.ready_to_convert()
    wanted, settled = given_by(module.graph, ids), settled_graph(module.graph)

    def never(*_: object) -> Tensor:
        raise AssertionError("a weight was rounded again")

    monkeypatch.setattr(WeightFakeQuantize, "forward", never)
    torch.testing.assert_close(given_by(settled, ids), wanted, rtol=1e-5, atol=1e-6)
