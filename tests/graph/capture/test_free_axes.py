"""Tests of dynamic axes: they are found and named, and the graph equals the model at other sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import resizable
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qatkit.graph.capture.axis_sizes import FreeAxis, sizes_between
from qatkit.graph.capture.free_axes import with_sizes
from qatkit.graph.signature import Example, call, flatten, output_leaves, resized, unflatten
from qatkit.graph.trace import trace
from qatkit_verify.errors import ConfigError


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(0))


def captured(model: nn.Module, example: Example, wanted: Any = "auto") -> Any:
    return trace(model.eval(), example, wanted)


def axes_of(graph: Any) -> dict[str, tuple[Any, int]]:
    return {axis.name: (axis.places, axis.step) for axis in graph.meta["free_axes"]}


def check_at(graph: Any, model: nn.Module, example: Example, sizes: dict[str, int], batch: int) -> None:
    """Checks that the graph computes what the model does for other sizes and values."""
    axes: tuple[FreeAxis, ...] = graph.meta["free_axes"]
    tensors = resized(flatten(example), batch, graph.meta["batch_axes"])
    tensors = with_sizes(tensors, {place: sizes[axis.name] for axis in axes for place in axis.places})
    tensors = tuple(t + 0.1 * torch.randn(t.shape) if t.is_floating_point() else t for t in tensors)
    with torch.no_grad():
        expected = output_leaves(call(model, unflatten(example, tensors)))[1]
        found = graph.eval()(*tensors)
    for a, b in zip(expected, found if isinstance(found, tuple) else (found,), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


IMAGE, ROWS, COLUMNS = (2, 3, 64, 64), ((0, 2),), ((0, 3),)
CASES: dict[str, tuple[Callable[[], nn.Module], Example, dict[str, Any], list[dict[str, int]]]] = {
    "padded U-Net": (
        lambda: resizable.UNet(pads=True), drawn(*IMAGE), {"height": (ROWS, 1), "width": (COLUMNS, 1)},
        [{"height": 64, "width": 97}, {"height": 71, "width": 33}],
    ),
    "U-Net": (
        lambda: resizable.UNet(pads=False), drawn(*IMAGE), {"height": (ROWS, 4), "width": (COLUMNS, 4)},
        [{"height": 96, "width": 44}],
    ),
    "detector": (
        resizable.Detector, drawn(*IMAGE), {"height": (ROWS, 1), "width": (COLUMNS, 1)},
        [{"height": 65, "width": 97}, {"height": 40, "width": 64}],
    ),
    "branches": (
        resizable.Branches, drawn(*IMAGE), {"height": (ROWS, 1), "width": (COLUMNS, 1)},
        [{"height": 96, "width": 64}, {"height": 32, "width": 160}],
    ),
    "grids": (
        resizable.Grids, drawn(*IMAGE), {"height": (ROWS, 1), "width": (COLUMNS, 1)},
        [{"height": 65, "width": 97}, {"height": 40, "width": 64}],
    ),
    "pyramid": (
        resizable.Pyramid, drawn(*IMAGE), {"height": (ROWS, 1), "width": (COLUMNS, 1)},
        [{"height": 300, "width": 130}, {"height": 40, "width": 400}],
    ),
    "pools": (
        resizable.Pools, drawn(*IMAGE), {"height": (ROWS, 1), "width": (COLUMNS, 1)},
        [{"height": 65, "width": 97}, {"height": 40, "width": 64}],
    ),
    "padded to a multiple": (
        resizable.ToMultiple, drawn(2, 3, 50, 70), {"height": (ROWS, 1), "width": (COLUMNS, 1)},
        [{"height": 64, "width": 33}, {"height": 17, "width": 80}],
    ),
    "vocoder": (resizable.Vocoder, drawn(2, 20, 33), {"length": (((0, 2),), 1)}, [{"length": 9}, {"length": 70}]),
    "conformer": (
        resizable.Conformer, drawn(2, 61, 20), {"length": (((0, 1),), 1)}, [{"length": 30}, {"length": 90}],
    ),
    "streams": (
        lambda: resizable.Streams(batch_first=True), (drawn(2, 12, 20), drawn(1, 2, 24)),
        {"length": (((0, 1),), 1)}, [{"length": 3}, {"length": 31}],
    ),
    "cache": (
        resizable.Cached, (drawn(2, 1, 32), drawn(2, 4, 9, 8), drawn(2, 4, 9, 8)),
        {"length": (((1, 2), (2, 2)), 1)}, [{"length": 2}, {"length": 64}],
    ),
    "causal": (resizable.Causal, ids(2, 16), {"length": (((0, 1),), 1)}, [{"length": 5}, {"length": 40}]),
    "masked": (
        resizable.Masked, (ids(2, 16), torch.ones(2, 16)), {"length": (((0, 1), (1, 1)), 1)}, [{"length": 23}],
    ),
    "windows": (
        resizable.Windows, drawn(*IMAGE), {"height": (ROWS, 1), "width": (COLUMNS, 1)},
        [{"height": 32, "width": 96}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_graph_takes_the_sizes_that_its_model_takes(name: str) -> None:
    make, example, axes, sizes = CASES[name]
    torch.manual_seed(0)
    model = make()
    graph = captured(model, example)
    assert axes_of(graph) == axes
    for batch, given in enumerate([*sizes, {axis.name: axis.size for axis in graph.meta["free_axes"]}], 1):
        check_at(graph, model, example, given, batch)


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_the_batch_is_where_samples_are_independent(streams: int) -> None:
    torch.manual_seed(0)
    model, example = resizable.Streams(batch_first=False), (drawn(6, streams, 20), drawn(1, streams, 24))
    graph = captured(model, example)
    assert graph.meta["batch_axes"] == (1, 1) and axes_of(graph) == {"length": (((0, 0),), 1)}
    check_at(graph, model, example, {"length": 17}, batch=4)
    assert captured(resizable.TimeMajor(), drawn(7, streams, 24)).meta["batch_axes"] == (1,)
    first = captured(resizable.Streams(batch_first=True), (drawn(streams, 6, 20), drawn(1, streams, 24)))
    assert first.meta["batch_axes"] == (0, 1)


class Odd(nn.Module):
    """A model that runs another layer if the number of rows is not a multiple of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        x = self.one(x)
        return self.two(x) if x.shape[2] % 8 else x


class Steps(nn.Module):
    """A model with a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 16)

    def forward(self, x: Tensor) -> Any:
        state = x.new_zeros(x.shape[0], 16)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state


class Chunks(nn.Module):
    """A model with a loop over chunks of two steps, the last of which may have only one."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        state, outputs = torch.zeros_like(x[:, :1]), []
        for start in range(0, x.shape[1], 2):
            part = x[:, start : start + 2]
            outputs.append(part + state)
            state = torch.tanh(self.state(part.mean(1, keepdim=True) + state))
        return self.out(torch.cat(outputs, 1))


class Pooled(nn.Module):
    """A model with an adaptive pool to 4x4."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.out = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(4), nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.pool(self.conv(x)).flatten(1))


class Fixed(nn.Module):
    """A model that only accepts images of 64 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        assert x.shape[3] == 64, "images have 64 columns"
        return self.conv(x)


class Numbers(nn.Module):
    """A model whose output is scaled by a float computed from a size."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.out(x) * float(x.shape[1] ** 0.5)


class Larger(nn.Module):
    """A model that adds a parameter to images with more rows than the example, before an adaptive pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.offset = nn.Conv2d(3, 4, 1), nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        rows, x = x.shape[2], self.conv(x)
        if rows > 64:
            x = x + self.offset
        return F.adaptive_avg_pool2d(x, 1)


def about(graph: Any) -> str:
    return "\n".join(f"{where}: {reason}" for where, reason in graph.meta["notes"])


def test_what_fixes_an_axis_is_named_with_its_line() -> None:
    graph = captured(Odd(), drawn(*IMAGE))
    assert axes_of(graph) == {"height": (ROWS, 8), "width": (COLUMNS, 1)}
    assert "multiple of 8: the size decides what is computed (in module 'two' at" in about(graph)
    graph = captured(Steps(), drawn(2, 9, 8))
    assert axes_of(graph) == {} and "input, axis 1: its size is fixed at 9" in about(graph)
    graph = captured(Chunks(), drawn(2, 8, 8))
    assert axes_of(graph) == {} and "axis 1: its size is fixed at 8: the size decides" in about(graph)
    graph = captured(Pooled(), drawn(*IMAGE))
    assert axes_of(graph) == {}
    assert "AdaptiveAvgPool2d works only at one size of its input (in module 'pool' at" in about(graph)
    graph = captured(Larger(), drawn(*IMAGE))
    assert list(axes_of(graph)) == ["width"] and "axis 2: its size is fixed at 64" in about(graph)
    graph = captured(Fixed(), drawn(*IMAGE))
    assert list(axes_of(graph)) == ["height"] and "images have 64 columns" in about(graph)
    graph = captured(Numbers(), drawn(2, 9, 8))
    assert axes_of(graph) == {} and "(at test_free_axes.py:" in about(graph)
    assert "axis 2" not in about(graph)  # the Linear fixes the number of features anyway


def test_an_inferred_size_that_is_fixed_is_a_number() -> None:
    """A fixed size that the model infers with -1 is a number in the graph, so -1 is left for a dynamic one.

    The model infers its channels after a bidirectional LSTM, as timm's sequencer2d_s does.
    """
    graph = captured(resizable.Sequencer(), drawn(*IMAGE))
    assert list(axes_of(graph)) == ["height", "width"]
    shapes = [node.args[1:] for node in graph.graph.nodes if node.target == "reshape"]
    assert [shape[-1] for shape in shapes] == [12, 12, 12, 12]
    assert [shape[0] == -1 for shape in shapes] == [True, False, True, False]


def test_without_a_wish_the_graph_is_of_the_example() -> None:
    graph = captured(resizable.Detector(), drawn(*IMAGE), "none")
    assert graph.meta["free_axes"] == ()
    assert not any(node.target == "size" and node.args[1] > 1 for node in graph.graph.nodes)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "axes",
    [
        [FreeAxis("", ((0, 1),), 2, (1, 3), 1)],
        [FreeAxis("", ((0, 2),), 64, (224, 96), 32)],
        [FreeAxis("", ((0, 2),), 16, (144, 17), 1), FreeAxis("", ((0, 3),), 14, (174, 15), 1)],
        [FreeAxis("", ((0, 2),), 4, (3, 5), 1), FreeAxis("", ((0, 3),), 4, (2, 5), 1)],
    ],
    ids=["small", "far", "two", "small ones"],
)
def test_the_graph_is_compared_at_new_and_different_sizes(axes: list[FreeAxis], number: int) -> None:
    found = sizes_between(axes, number)
    for axis, size in found.items():
        assert size not in (axis.size, *axis.others) and size > 0 and size % axis.step == 0
    assert len(set(found.values())) == len(axes)


def test_given_names_are_the_only_free_axes() -> None:
    model, example = resizable.UNet(pads=True), drawn(*IMAGE)
    graph = captured(model, example, {"input": {3: "columns"}})
    assert axes_of(graph) == {"columns": (COLUMNS, 1)}
    tied = captured(resizable.Masked(), (ids(2, 16), torch.ones(2, 16)), {"ids": {1: "t"}, "mask": {1: "t"}})
    assert axes_of(tied) == {"t": (((0, 1), (1, 1)), 1)}
    with pytest.raises(ConfigError, match=r"export.dynamic_axes.input.3=columns: .*images have 64 columns"):
        captured(Fixed(), example, {"input": {3: "columns"}})
    with pytest.raises(
        ConfigError, match=r"export.dynamic_axes=image: expected an input of the model \(input\)"
    ):
        captured(model, example, {"image": {2: "rows"}})
    with pytest.raises(
        ConfigError,
        match=r"export.dynamic_axes.input=0: expected an axis of the input other than the batch axis \(1, 2, 3\)",
    ):
        captured(model, example, {"input": {0: "n"}})


class SizeFunctions(nn.Module):
    """A model that computes with sizes in Python: divmod, *, /, //, %, negation and conversion to int."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        n, c, t = x.shape
        y = self.conv(x)
        half, rest = divmod(t, 2)
        back = F.pad(y[..., half + rest :], (0, t - half))
        doubled = F.interpolate(y, size=int(t * 2.0))[..., : 2 * t : 2]
        tail = y[..., -(t % 4 + 1) :].sum(-1, keepdim=True)
        spread = torch.linspace(0, 1, t) + torch.zeros(n, c, t) + x.numel() // (n * c) - t
        up = y.new_ones((n, c, -(-t // 3) * 3))[..., :t] * (t / 1)
        return back + doubled + tail + spread + up + len(y) * 0


def test_sizes_are_followed_through_arithmetic() -> None:
    torch.manual_seed(0)
    model, example = SizeFunctions(), drawn(2, 4, 24)
    graph = captured(model, example)
    assert axes_of(graph) == {"length": (((0, 2),), 1)}
    for batch, size in ((1, 25), (3, 26), (2, 47), (2, 5)):
        check_at(graph, model, example, {"length": size}, batch)
