"""What calibration saw comes back as it was, or is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chain import Chain, Residual, noise, settle
from torch import fx, nn

from qatkit.backends import FBGEMM
from qatkit.calibration import calibrate
from qatkit.calibration.statistics import fingerprint, of_model, restore, save, table
from qatkit.errors import ConfigError
from qatkit.graph.fuse import fuse
from qatkit.graph.prepare import fake_quantizers, prepare_qat
from qatkit.graph.stub import stub
from qatkit.observers import EntropyObserver


def graph(kind: type[nn.Module] = Chain) -> fx.GraphModule:
    torch.manual_seed(0)
    model = settle(kind(), 3, 12, 12)
    return prepare_qat(
        stub(fuse(model).graph).graph, FBGEMM, noise(2, 3, 12, 12), observer=EntropyObserver
    ).graph.eval()


def key(of: fx.GraphModule) -> dict[str, str]:
    return {"model": of_model(of), "data": "d", "method": "m"}


@pytest.fixture
def kept(tmp_path: Path) -> tuple[fx.GraphModule, Path]:
    seen = graph()
    before = key(seen)
    calibrate(seen, [noise(8, 3, 12, 12)])
    assert key(seen) == before  # ranges are no part of the model
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
            ConfigError, match=f"calibration.cache=.*statistics of another {part} \\({part} . there"
        ):
            restore(path, fresh, {**key(fresh), part: "other"})
    for other in (graph(Residual), graph()):
        if isinstance(other.get_submodule("conv1"), nn.Module):
            with torch.no_grad():
                next(other.parameters()).add_(1e-3)
        with pytest.raises(ConfigError, match="statistics of another model"):
            restore(path, other, key(other))
    assert all(not q.observer.seen for q in fake_quantizers(fresh).values() if q.observer is not None)


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_refused(kept: tuple[fx.GraphModule, Path], damage: str) -> None:
    _, path = kept
    path.write_bytes(path.read_bytes()[:-100] if damage == "cut" else b"{}")
    fresh = graph()
    with pytest.raises(ConfigError, match=r"calibration\.cache=.*undamaged"):
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
    quantizer = fake_quantizers(kept[0])["conv1_quant"]
    assert ranges["conv1"]["scale"] == quantizer.scale.item() and ranges["conv1"]["dtype"] == "uint8"
    assert ranges["conv1"]["low"] == 0.0  # a ReLU
    assert ranges["conv1"]["high"] == pytest.approx(255 * quantizer.scale.item())
