"""Tests of placements: layouts predict where ONNX Runtime (de)quantizes, and the fastest placement wins."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from gated import Gated

from qatkit.choose.placement.choices import Choices, refined
from qatkit.choose.precision.costs import Costs, Measured
from qatkit.choose.precision.layout import Layouts
from qatkit.config.schema import OverrideConfig
from qatkit.export.torch_to_onnx import export_onnx
from qatkit.graph.nodes import site
from qatkit.train.module import QATModule
from qatkit.verify.profile import run_optimized
from qatkit.verify.site_kernels import DEQUANTIZE, QUANTIZE, SiteKernel
from qatkit_verify.errors import ConfigError
from qatkit_verify.placement.sites import Sites

EXAMPLE = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
SILUS = ("silu", "silu1", "silu2")


def of(sites: Sites) -> QATModule:
    overrides = {one: OverrideConfig(float=True) for one in sites.floats}
    overrides |= {one: OverrideConfig(int8=True) for one in sites.opened}
    module = QATModule(Gated(), EXAMPLE, overrides=overrides)
    module.calibrate([EXAMPLE])
    module.ready_to_convert()
    return module


@pytest.fixture(scope="module")
def layouts() -> Layouts:
    module = QATModule(Gated(), EXAMPLE)
    return Layouts(module.opened(Gated()).graph, module.backend)


@pytest.fixture(scope="module")
def choices(layouts: Layouts) -> Choices:
    module = QATModule(Gated(), EXAMPLE)
    return Choices(module.opened(Gated()).graph, module.backend, layouts, ())


def drawn() -> list[Sites]:
    """Returns fixed and random placements.

    Pools, the sigmoid and the product aren't drawn: between QDQ pairs, ONNX Runtime runs them in int8 anyway.
    """
    draw = random.Random(0)
    sites = ("stem", *SILUS, "expand", "depthwise", "gate", "project", "fc")
    found = [
        Sites(),
        Sites(opened=frozenset(SILUS)),
        Sites(frozenset({"depthwise", "silu1", "silu2", "gate"})),
    ]
    while len(found) < 8:
        floats = frozenset(one for one in sites if draw.random() < 0.35)
        found.append(
            Sites(floats, frozenset(one for one in SILUS if one not in floats and draw.random() < 0.5))
        )
    return found


def moves(node: ir.Node) -> bool:
    """Returns whether a node is in a Q/DQ pair after a Transpose of a dequantized tensor.

    ONNX Runtime before 1.30 adds such pairs.
    """
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node.op_type == DEQUANTIZE:
        return source is not None and source.op_type == QUANTIZE and moves(source)
    before = source.inputs[0].producer() if source is not None and source.inputs[0] is not None else None
    return (
        source is not None
        and source.op_type == "Transpose"
        and before is not None
        and before.op_type == DEQUANTIZE
    )


@pytest.mark.parametrize("sites", drawn())
def test_the_borders_of_a_layout_are_those_of_the_file(
    sites: Sites, layouts: Layouts, tmp_path: Path
) -> None:
    """Compares the numbers and sizes of (de)quantize kernels in the optimized graph with those of the layout."""
    path = tmp_path / "model.onnx"
    export_onnx(of(sites).convert().graph, EXAMPLE, path)
    optimized = run_optimized(path, input_shape=(1, 3, 12, 12), runs=2)
    seen: dict[str, Counter[int]] = {QUANTIZE: Counter(), DEQUANTIZE: Counter()}
    for node in optimized.graph:
        if node.op_type in seen and not moves(node):
            seen[node.op_type][int(np.prod(optimized.kernels[str(node.name)].output_shapes[0]))] += 1
    layout = layouts(sites.floats, sites.opened)
    assert Counter(layout.quantized) == seen[QUANTIZE], sites
    assert Counter(layout.dequantized) == seen[DEQUANTIZE]


@pytest.mark.parametrize("pattern", ["silu1", "op/silu", "silu*"])
def test_an_int8_silu_has_int8_kernels_and_the_module_outputs(pattern: str, tmp_path: Path) -> None:
    module = QATModule(Gated(), EXAMPLE, overrides={pattern: OverrideConfig(int8=True)})
    module.calibrate([EXAMPLE])
    module.ready_to_convert()
    converted, path = module.convert().graph, tmp_path / "model.onnx"
    export_onnx(converted, EXAMPLE, path)
    count = 1 if pattern == "silu1" else 3
    kernels = Counter(node.op_type for node in run_optimized(path, input_shape=(2, 3, 12, 12)).graph)
    assert (
        kernels["QLinearSigmoid"] == kernels["QLinearMul"] == 1 + count and kernels["QuickGelu"] == 3 - count
    )
    logits = ort.InferenceSession(path).run(None, {"input": EXAMPLE.numpy()})[0]
    np.testing.assert_allclose(logits, converted(EXAMPLE).detach(), atol=1e-5)
    with torch.no_grad():
        exact = Gated().eval()(EXAMPLE).numpy()
    assert np.square(logits - exact).mean() < 0.01 * np.square(exact).mean()


def test_an_override_of_silus_names_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"backend\.overrides=depthwise: the pattern matches no silu \(known: op/silu, "
    ):
        QATModule(Gated(), EXAMPLE, overrides={"depthwise": OverrideConfig(int8=True)})


def made_up(layouts: Layouts, choices: Choices, slow: dict[str, tuple[float, float]]) -> Costs:
    """Returns the costs of a made-up machine, in microseconds.

    Operators take (10, 20) in (int8, float) or the times in `slow`; quantizing or dequantizing a tensor takes
    1 + values / 1000.
    """

    def file(sites: Sites) -> Measured:
        layout = layouts(sites.floats, sites.opened)
        kernels = [
            SiteKernel(one, "", 1, slow.get(one, (10.0, 20.0))[one not in layout.int8])
            for one in choices.computing
        ]
        borders = {QUANTIZE: layout.quantized, DEQUANTIZE: layout.dequantized}
        kernels += [SiteKernel(None, kind, n, 1 + n / 1000) for kind, sizes in borders.items() for n in sizes]
        return Measured(layout, kernels, sum(kernel.microseconds for kernel in kernels) / 1e3)

    operators = layouts.operators
    every = [
        Sites(),
        Sites(frozenset(operators)),
        Sites(opened=choices.islands),
        Sites(frozenset(operators[0::2])),
    ]
    return Costs([file(one) for one in every], operators, layouts.sites)


def test_operators_slow_in_int8_stay_float_with_their_neighbours(layouts: Layouts, choices: Choices) -> None:
    """The depthwise Conv and the SiLUs are slow in int8; the operators around them must stay int8."""
    slow = {"depthwise": (90.0, 10.0), **dict.fromkeys(SILUS, (60.0, 10.0))}
    costs = made_up(layouts, choices, slow)
    found = choices(costs)
    assert {"depthwise", "silu1"} <= found.floats and not found.opened
    assert not {"stem", "expand", "project", "fc"} & found.floats
    time = {
        one: costs(layouts(one.floats, one.opened))
        for one in (found, Sites(), Sites(frozenset({"depthwise"})))
    }
    assert time[found] == min(time.values())


def test_silus_are_int8_where_that_is_faster(layouts: Layouts, choices: Choices) -> None:
    assert choices.islands == set(SILUS)
    found = choices(made_up(layouts, choices, dict.fromkeys(SILUS, (2.0, 10.0))))
    assert found == Sites(opened=frozenset(SILUS))


def test_nothing_changes_where_the_table_is_best(layouts: Layouts, choices: Choices) -> None:
    slow = {**dict.fromkeys(SILUS, (60.0, 10.0)), "depthwise": (10.0, 60.0)}
    assert choices(made_up(layouts, choices, slow)) == Sites()


def test_a_refined_placement_is_no_slower(layouts: Layouts, choices: Choices) -> None:
    draw = random.Random(1)
    slow = {one: (draw.uniform(5, 60), draw.uniform(5, 60)) for one in choices.computing}
    costs = made_up(layouts, choices, slow)

    def time(sites: Sites) -> float:
        return costs(layouts(sites.floats, sites.opened))

    start = Sites(frozenset(choices.computing[::3]))
    end = refined(start, choices.computing, time)
    assert time(end) <= time(start)
    others = [Sites(end.floats ^ {one}, end.opened) for one in choices.computing]
    assert all(time(one) >= 0.999 * time(end) for one in others)


def test_sites_are_those_of_the_graph(layouts: Layouts, choices: Choices) -> None:
    names = [site(node) for node in QATModule(Gated(), EXAMPLE).opened(Gated()).graph.nodes]
    assert set(choices.computing) <= set(names) and list(layouts.sites) == names
