"""Tests of the calibration cache: it restores everything, or rejects the file with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from chain import Chain, Residual, noise, settle
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from qatkit.calibration import calibrate
from qatkit.calibration.cache import fingerprint, of_model, restore, save, table
from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import prepare_qat
from qatkit.graph.quantizers import fake_quantizers
from qatkit.graph.stub import stub
from qatkit.quant.backends import FBGEMM, QNNPACK
from qatkit.quant.observers import EntropyObserver
from qatkit.quant.weight_fake_quantize import Quantizers
from qatkit.train.module import QATModule
from qatkit_verify.errors import ConfigError


def graph(kind: type[nn.Module] = Chain) -> fx.GraphModule:
    torch.manual_seed(0)
    model = settle(kind(), 3, 12, 12)
    return prepare_qat(
        stub(fuse(model, noise(2, 3, 12, 12)).graph, noise(2, 3, 12, 12)).graph,
        FBGEMM,
        noise(2, 3, 12, 12),
        quantizers=Quantizers(observer=EntropyObserver),
    ).graph.eval()


def key(of: fx.GraphModule) -> dict[str, str]:
    return {"model": of_model(of), "data": "d", "method": "m"}


@pytest.fixture
def kept(tmp_path: Path) -> tuple[fx.GraphModule, Path]:
    seen = graph()
    before = key(seen)
    calibrate(seen, [noise(8, 3, 12, 12)])
    assert key(seen) == before  # ranges aren't part of the model's key
    save(tmp_path / "kept" / "cache.safetensors", seen, before, {"notes": ["n"]})
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["cache.safetensors"]
    return seen, tmp_path / "kept" / "cache.safetensors"


def test_everything_comes_back(kept: tuple[fx.GraphModule, Path]) -> None:
    seen, path = kept
    fresh = graph()
    assert restore(path, fresh, key(fresh)) == {"notes": ["n"]}
    for name, value in seen.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_another_model_other_data_or_another_method_is_refused(kept: tuple[fx.GraphModule, Path]) -> None:
    _, path = kept
    fresh = graph()
    for part in ("data", "method"):
        with pytest.raises(
            ConfigError,
            match=f"calibration.cache=.*the file is from another model.*\\({part} is ., not other\\)",
        ):
            restore(path, fresh, {**key(fresh), part: "other"})
    for other in (graph(Residual), graph()):
        if isinstance(other.get_submodule("conv1"), nn.Module):
            with torch.no_grad():
                next(other.parameters()).add_(1e-3)
        with pytest.raises(ConfigError, match=r"the file is from another model.*\(model is \w+, not \w+\)"):
            restore(path, other, key(other))
    assert all(not q.observer.seen for q in fake_quantizers(fresh).values() if q.observer is not None)


class Strided(nn.Module):
    """A net with settings that appear neither in its code nor in its tensors."""

    def __init__(self, stride: int, six: bool, pool: int) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 4, 3, stride, padding=1), nn.ReLU6() if six else nn.ReLU()
        self.pool, self.fc = nn.AvgPool2d(pool), nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc(self.pool(self.relu(self.conv(x))).mean((2, 3))))


def test_settings_outside_code_and_tensors_change_the_cache_key() -> None:
    found = []
    variants = [(1, False, 2, FBGEMM), (2, False, 2, FBGEMM), (1, True, 2, FBGEMM), (1, False, 4, FBGEMM),
                (1, False, 2, QNNPACK), (1, False, 2, FBGEMM.reduced(True))]  # fmt: skip
    for stride, six, pool, backend in variants:
        torch.manual_seed(0)
        model = Strided(stride, six, pool)
        model(torch.zeros(1, 3, 16, 16))
        torch.manual_seed(0)
        nn.init.normal_(model.fc.weight)
        module = QATModule(model.eval(), noise(2, 3, 16, 16), backend=backend)
        found.append(of_model(module.graph))
    assert len(set(found)) == len(variants)


def test_changed_or_missing_tensors_and_strange_keys_are_damage(
    kept: tuple[fx.GraphModule, Path],
) -> None:
    _, path = kept
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    low = next(name for name in tensors if name.endswith(".low"))
    changes: list[tuple[dict[str, Tensor], dict[str, str]]] = [
        (tensors | {low: torch.tensor(float("nan"))}, metadata),
        ({k: v for k, v in tensors.items() if k != low}, metadata),
        (tensors, metadata | {"key": "[1]"}),
    ]
    for changed, about in changes:
        save_file(changed, path, about)
        fresh = graph()
        with pytest.raises(ConfigError, match=r"calibration\.cache=.*the file is damaged"):
            restore(path, fresh, key(fresh))
        assert not any(q.observer.seen for q in fake_quantizers(fresh).values() if q.observer is not None)


def test_a_folder_that_takes_no_file_is_named(kept: tuple[fx.GraphModule, Path]) -> None:
    seen, path = kept
    with pytest.raises(ConfigError, match=r"calibration\.cache=.*a file that can be written"):
        save(path / "below" / "cache.safetensors", seen, key(seen), {})


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_refused(kept: tuple[fx.GraphModule, Path], damage: str) -> None:
    _, path = kept
    path.write_bytes(path.read_bytes()[:-100] if damage == "cut" else b"{}")
    fresh = graph()
    with pytest.raises(ConfigError, match=r"calibration\.cache=.*the file is damaged"):
        restore(path, fresh, key(fresh))


def test_fingerprints_tell_tensors_and_values_apart() -> None:
    parts = [
        (torch.zeros(4),),
        (torch.zeros(2, 2),),
        (torch.zeros(4).int(),),
        ([1, 2],),
        ([2, 1],),
        ({"a": 1},),
    ]
    assert len({fingerprint(*one) for one in parts}) == len(parts)
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_the_table_holds_the_ranges(kept: tuple[fx.GraphModule, Path]) -> None:
    ranges = table(kept[0])
    quantizer = fake_quantizers(kept[0])["conv1"]
    assert ranges["conv1"]["scale"] == quantizer.scale.item() and ranges["conv1"]["dtype"] == "uint8"
    assert ranges["conv1"]["low"] == 0.0  # a ReLU
    assert ranges["conv1"]["high"] == pytest.approx(255 * quantizer.scale.item())


def test_a_fingerprint_of_tensors_by_name_reads_all_their_values() -> None:
    first = {"ids": torch.arange(5000), "x": torch.zeros(5000)}
    second = {**first, "x": first["x"].index_fill(0, torch.tensor([2500]), 1.0)}
    assert fingerprint(first) == fingerprint({name: one.clone() for name, one in first.items()})
    assert len({fingerprint(first), fingerprint(second), fingerprint({"x": first["x"]})}) == 3
