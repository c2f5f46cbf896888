"""Tests of observers against NumPy on the same batches."""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path

import numpy as np
import pytest
import torch

from qatkit.quant.observers import MinMaxObserver, MovingAverageMinMaxObserver, Observer


def stream(observer: Observer, batches: list[torch.Tensor]) -> tuple[float, float]:
    for batch in batches:
        observer.update(*torch.aminmax(batch), batch)
    return observer.low.item(), observer.high.item()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(17, generator=generator) * (i + 1) - i for i in range(count)]


@pytest.mark.parametrize("kind", [MinMaxObserver, MovingAverageMinMaxObserver])
def test_nothing_is_seen_before_the_first_batch(kind: type[Observer]) -> None:
    observer = kind()
    assert not observer.seen
    assert stream(observer, [torch.tensor([-2.0, 5.0])]) == (-2.0, 5.0)
    assert observer.seen


def test_min_max_of_a_stream_is_min_max_of_the_whole() -> None:
    data = batches(9)
    whole = torch.cat(data)
    assert stream(MinMaxObserver(), data) == (whole.min().item(), whole.max().item())
    assert stream(MinMaxObserver(), data[::-1]) == (whole.min().item(), whole.max().item())


@pytest.mark.parametrize("momentum", [0.01, 0.2, 1.0])
def test_moving_average_against_a_loop(momentum: float) -> None:
    data = batches(12)
    low = high = 0.0
    for n, batch in enumerate(data, start=1):
        weight = max(1 / n, momentum)
        low += weight * (float(np.min(batch.numpy())) - low)
        high += weight * (float(np.max(batch.numpy())) - high)
    assert stream(MovingAverageMinMaxObserver(momentum), data) == pytest.approx((low, high), rel=1e-5)


def test_the_first_batches_are_a_plain_mean() -> None:
    data = batches(10)
    low, high = stream(MovingAverageMinMaxObserver(0.01), data)
    assert low == pytest.approx(np.mean([b.min().item() for b in data]), rel=1e-5)
    assert high == pytest.approx(np.mean([b.max().item() for b in data]), rel=1e-5)


@pytest.mark.parametrize("kind", [MinMaxObserver, MovingAverageMinMaxObserver])
def test_a_saved_observer_goes_on_where_it_stopped(kind: type[Observer]) -> None:
    data = batches(8)
    expected = stream(kind(), data)
    first, second = kind(), kind()
    stream(first, data[:3])
    second.load_state_dict(first.state_dict())
    assert stream(second, data[3:]) == expected


def _rank(rank: int, file: str, folder: str, kind: type[Observer], first: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    observer, data = kind(), batches(6)
    stream(observer, data[first:] if rank else data[:first])
    observer.all_reduce()
    torch.save(observer.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "first",
    [pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 6],
    ids=["even", "uneven", "one rank without images"],
)
@pytest.mark.parametrize("kind", [MinMaxObserver, MovingAverageMinMaxObserver])
def test_ranks_agree_on_what_one_process_sees(kind: type[Observer], first: int, tmp_path: Path) -> None:
    file, context = str(tmp_path / "rendezvous"), mp.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(i, file, str(tmp_path), kind, first)) for i in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        found = state["low"].item(), state["high"].item()
        assert found == pytest.approx(stream(kind(), batches(6)), rel=1e-6)


def test_memory_does_not_grow() -> None:
    observer = MovingAverageMinMaxObserver()
    stream(observer, batches(50))
    assert sum(b.numel() for b in observer.buffers()) == 3
