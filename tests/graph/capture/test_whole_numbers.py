"""Tests of integer inputs: values drawn to capture the model and to check the graph are valid for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import Calls, noise_of
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.proof import prove
from qatkit.graph.signature import Example, call, flatten, other_values
from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError

IDS = torch.tensor([[0, 40, 7], [2, 11, 5], [1, 49, 6], [2, 0, 7]])


def columns(self: Any, ids: Tensor) -> Any:
    parts = [table(ids[:, i]) for i, table in enumerate(self.tables)]
    return self.after(torch.cat(parts, 1))


def one_hot_columns(self: Any, ids: Tensor) -> Any:
    return self.after(torch.cat([F.one_hot(ids[:, 0], 3), F.one_hot(ids[:, 1], 50)], 1).float())


def floats_and_ids(self: Any, x: Tensor) -> Any:
    return self.after(self.table(x[:, 0].long()) + x[:, 1:].mean(1, keepdim=True))


def ids_that_start_at_five(self: Any, ids: Tensor, x: Tensor) -> Any:
    return self.after(self.table(ids[:, 2] - 5) + x)


def steps(self: Any, x: Tensor, t: Tensor) -> Any:
    return self.after(x + self.table(t.long()))


def tables(*sizes: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Embedding(size, 4) for size in sizes])


MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], Example]] = {
    "columns": (columns, {"tables": tables(3, 50, 8), "after": nn.Linear(12, 6)}, IDS),
    "one batch": (columns, {"tables": tables(3, 50, 8), "after": nn.Linear(12, 6)}, IDS[:1]),
    "one hot": (one_hot_columns, {"after": nn.Linear(53, 6)}, IDS[:, :2].contiguous()),
    "offset": (
        ids_that_start_at_five,
        {"table": nn.Embedding(3, 4), "after": nn.Linear(4, 6)},
        (IDS, noise_of(4, 4)),
    ),
    "in one tensor": (
        floats_and_ids,
        {"table": nn.Embedding(3, 4), "after": nn.Linear(4, 6)},
        IDS.float(),
    ),
    "steps": (
        steps,
        {"table": nn.Embedding(1000, 4), "after": nn.Linear(4, 6)},
        (noise_of(4, 4), torch.tensor([0.0, 999, 500, 3])),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_ids_that_are_drawn_are_in_the_tables(name: str) -> None:
    function, state, example = MODELS[name]
    model = Calls(function, **state).eval()
    graph = trace(model, example)
    assert 0 in graph.meta["batch_axes"]
    prove(model, graph, example)
    three = [torch.cat([one, one])[:3] for one in flatten(example)]
    torch.testing.assert_close(graph(*three), call(model, three))


def test_whole_numbers_stay_in_the_range_of_the_example() -> None:
    ids, counts, mask = torch.tensor([[5, 90, 7, 6]]), torch.tensor([3.0, 0, 12]), torch.eye(3)
    new_ids, new_counts, new_mask = other_values([ids, counts, mask], seed=1)
    assert sorted(new_ids.flatten().tolist()) == [5, 6, 7, 90]
    assert sorted(new_counts.tolist()) == [0, 3, 12]
    assert new_mask.unique().numel() > 3  # zeros and ones are not taken for ids
    kept = other_values([ids, counts], seed=1, whole=False)
    assert all(torch.equal(a, b) for a, b in zip(kept, [ids, counts], strict=True))


def test_a_model_that_fails_on_a_batch_of_one_is_named() -> None:
    def several(self: Any, x: Tensor) -> Any:
        if len(x) < 2:
            raise ValueError("no batch of one")
        return self.after(x)

    model = Calls(several, after=nn.Linear(6, 6)).eval()
    with pytest.raises(
        ConfigError, match=r"model\.name=Calls: the model failed .*\[1, 6\] \(ValueError: no batch"
    ):
        prove(model, trace(model, noise_of(2, 6)), noise_of(2, 6))


def test_offsets_that_must_rise_are_kept() -> None:
    def bags(self: Any, ids: Tensor, offsets: Tensor) -> Any:
        return self.after(F.embedding_bag(ids, self.table.weight, offsets))

    example = (torch.arange(8), torch.tensor([0, 3, 6, 8]))
    model = Calls(bags, table=nn.Embedding(8, 4), after=nn.Linear(4, 6)).eval()
    prove(model, trace(model, example), example)
