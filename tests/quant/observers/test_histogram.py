"""Tests of a histogram over batches, in any order and grouping, against np.histogram of all values."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from qatkit.quant.observers import Histogram
from qatkit.quant.observers.histogram import grid, stride


def noise(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


STREAMS: dict[str, list[Tensor]] = {
    "growing": [noise(500, seed=i) * 3.0**i for i in range(9)],
    "shrinking": [noise(500, seed=i) * 3.0**-i for i in range(9)],
    "drifting": [noise(300, seed=i) * 0.1 + 5 * i for i in range(7)],
    "positive": [noise(300, seed=i).relu() * (1 + i) for i in range(5)],
    "negative": [-noise(300, seed=i).abs() - i for i in range(5)],
    "constant": [torch.full((40,), 3.25), torch.full((2,), 3.25)],
    "zeros": [torch.zeros(5), torch.zeros(7)],
    "outlier": [noise(1000), torch.tensor([12345.0]), noise(1000, seed=1)],
    "denormal": [torch.tensor([1e-45, 3e-42, 0.0]), torch.tensor([-1e-40, 1e-44])],
    "huge": [torch.tensor([3e38, -3e38]), noise(100)],
    "constant, then more": [torch.full((40,), 0.3), noise(300) * 0.1 + 0.3],
    "constant below, then more": [torch.full((40,), -0.01), noise(300) * 0.1],
    "zeros, then tiny": [torch.zeros(9), noise(300) * 1e-9],
    "blank images": [torch.full((40,), 0.2 * i) for i in range(5)],
    "single": [torch.tensor([-7.5])],
}


def histogram(stream: list[Tensor], bins: int = 256) -> Histogram:
    result = Histogram(bins)
    for batch in stream:
        result.add(batch, *torch.aminmax(batch))
    return result


def same(a: Histogram, b: Histogram) -> bool:
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


@pytest.mark.parametrize("name", STREAMS)
def test_it_is_the_histogram_of_the_whole_stream(name: str) -> None:
    made = histogram(STREAMS[name])
    whole = torch.cat(STREAMS[name]).double().numpy()
    assert (made.low.item(), made.high.item()) == (whole.min(), whole.max())
    assert math.log2(made.width).is_integer()
    first = math.floor(whole.min() / made.width)
    edges = (first + np.arange(257)) * made.width  # bins are [a, b), with no value above the last edge
    assert np.array_equal(made.counts.numpy(), np.histogram(whole, edges)[0])
    assert made.total == len(whole)


@pytest.mark.parametrize("name", STREAMS)
def test_neither_order_nor_grouping_of_batches_matters(name: str) -> None:
    expected = histogram(STREAMS[name])
    for seed in range(4):
        shuffled = random.Random(seed).sample(STREAMS[name], len(STREAMS[name]))
        assert same(histogram(shuffled), expected)
    assert same(histogram([torch.cat(STREAMS[name])]), expected)


def test_the_width_is_the_smallest_that_holds_the_range() -> None:
    rng = random.Random(0)
    for _ in range(300):
        low, high = sorted(float(np.float32(rng.gauss(0, 1) * 10 ** rng.uniform(-6, 6))) for _ in range(2))
        exponent, first = grid(low, high, 256)
        used = math.floor(high / 2.0**exponent) - first + 1
        half = math.floor(high / 2.0 ** (exponent - 1)) - math.floor(low / 2.0 ** (exponent - 1)) + 1
        assert used <= 256
        assert half > 256 or max(abs(low), abs(high)) >= 2.0 ** (21 + exponent)


def test_values_outside_the_ends_given_count_as_the_ends() -> None:
    x = noise(4000)
    made, expected = Histogram(), Histogram()
    made.add(x, *(end.relu() for end in torch.aminmax(x)))
    expected.add(x.relu(), *torch.aminmax(x.relu()))
    assert same(made, expected)
    assert made.counts[0] > 1900  # the zeros of the ReLU


def test_zero_is_an_edge_and_edges_lie_within_the_extremes() -> None:
    for stream in STREAMS.values():
        made = histogram(stream)
        counts, edges = made.bins()
        assert len(edges) == len(counts) + 1
        assert edges[0] == made.low and edges[-1] == made.high
        assert (edges.diff() >= 0).all() and counts.sum() == made.total
        if made.low < 0 < made.high:
            assert 0 in edges


def test_state_is_saved_restored_and_does_not_grow(tmp_path: Path) -> None:
    first, second = histogram(STREAMS["growing"][:4]), Histogram(256)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for batch in STREAMS["growing"][4:]:
        second.add(batch, *torch.aminmax(batch))
    assert same(second, histogram(STREAMS["growing"]))
    assert sum(b.numel() * b.element_size() for b in Histogram().buffers()) == 8192 * 8 + 8
    assert sum(b.numel() * b.element_size() for b in second.buffers()) == 256 * 8 + 8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_value_shows_in_the_extremes_and_stays(bad: float) -> None:
    made = histogram([noise(10), torch.tensor([1.0, bad]), noise(10)])
    assert not torch.stack((made.low, made.high)).isfinite().all()
    assert made.total == 10


SHAPES = [(8, 64, 112, 112), (8, 197, 768), (64, 96, 5, 5), (3, 100_003), (5, 320, 160), (7, 1001, 30)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_tensor_is_sampled_at_all_positions(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    step = stride(count)
    assert math.gcd(step, count) == 1
    assert count / step >= min(count, 2**17)
    assert step <= 16
    index = np.unravel_index(np.arange(0, count, step), shape)
    for axis, size in enumerate(shape):  # each row, column and channel is sampled equally often
        met = np.bincount(index[axis], minlength=size)
        assert met.max() - met.min() <= max(2, 0.01 * met.mean())


def test_a_sampled_tensor_keeps_exact_extremes_and_near_shares() -> None:
    x = noise(3_000_000).view(3, 1000, 1000)
    x[1, 2, 3] = 40.0
    made = histogram([x], 8192)
    assert made.high == 40
    assert 2**17 <= made.total < 500_000
    _, edges = made.bins()
    above = made.counts[: len(edges) - 1][edges[:-1] >= 3].sum().item() / made.total
    limit = float(edges[edges >= 3][0])
    share = (x >= limit).double().mean().item()
    assert above == pytest.approx(share, abs=4 * math.sqrt(share / made.total))


def _rank(rank: int, file: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    made = histogram(STREAMS["drifting"][rank::2])
    made.all_reduce()
    torch.save(made.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_add_up_to_the_histogram_of_all(tmp_path: Path) -> None:
    file, context = str(tmp_path / "rendezvous"), mp.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, file, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    expected = histogram(STREAMS["drifting"])
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert all(torch.equal(value, state[name]) for name, value in expected.state_dict().items())


def test_in_one_process_there_is_nothing_to_reduce() -> None:
    made = histogram(STREAMS["growing"])
    made.all_reduce()
    assert same(made, histogram(STREAMS["growing"]))
