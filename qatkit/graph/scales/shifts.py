"""Moves scales so that their shifts are within hardware bounds (`qatkit.quant.backends.Shifts`), and lists the changes.

With scales 2^-pos an operator requantizes by shifts, whose sizes are differences of positions. A sum needs a shift
between the positions of its inputs (read), and one from the coarser input's position to that of the output (write). A
product is shifted directly to the position of the output. If a read shift is out of bounds, the scale of the finer
input is moved, else the scale of the output. The weights of convolutions keep their own shifts within bounds
(`qatkit.quant.weight_fake_quantize.WeightFakeQuantize.bounded`).

Bounds: the refinement passes of AMD Quark's quantizer for NPUs (adjust_shift_cut, _read, _write).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, fx

from qatkit.graph.nodes import module_of, op_class, site
from qatkit.graph.quantizers import QUANTIZES, is_quantizer, quantized_operators
from qatkit.graph.scales.moves import Scales
from qatkit.graph.scales.shared import quantizers_around, shared_groups
from qatkit.quant.backends import Backend
from qatkit.quant.fake_quantize import FakeQuantize

_ROUNDS = 4  # moving a scale may require moving that of the next operator


class ShiftBounds:
    """Moves the scales around sums and products until their shifts are within bounds, in at most `_ROUNDS` rounds.

    Args:
        graph_module: a prepared graph whose backend bounds shifts.
        position: positions of the quantizers in `Scales`, by id.
        device: the device of the scales.
    """

    def __init__(
        self, graph_module: fx.GraphModule, position: Mapping[int, int], device: torch.device
    ) -> None:
        backend = cast(Backend, graph_module.meta["backend"])
        assert backend.shifts is not None
        self._shifts = backend.shifts
        found: dict[str, list[list[int]]] = {"add": [], "mul": []}
        for node in graph_module.graph.nodes:
            around = quantizers_around(node, backend) if op_class(node) in found else []
            if around and len(around) == len(node.all_input_nodes) + 1:
                known = [position[id(one)] for one in around if one.spec.powers_of_two]
                if len(known) == len(around):
                    found[op_class(node)].append([known[0], known[-2], known[-1]])
        self._sums, self._products = (
            torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 3).unbind(1)
            for rows in found.values()
        )

    def __call__(self, scales: Scales) -> None:
        values = scales.values
        for _ in range(_ROUNDS):
            first, second, after = self._sums
            coarser = torch.maximum(values[first], values[second]) * 2.0 ** -self._shifts.read[1]
            _raise(values, first, coarser)
            _raise(values, second, coarser)
            _keep(values, after, torch.maximum(values[first], values[second]), self._shifts.sum_write)
            first, second, after = self._products
            _keep(values, after, values[first] * values[second], self._shifts.product_write)


def _raise(values: Tensor, at: Tensor, least: Tensor) -> None:
    values.scatter_reduce_(0, at, least, "amax")


def _keep(values: Tensor, at: Tensor, unit: Tensor, bounds: tuple[int, int]) -> None:
    """Clamps the scales at `at` to [unit · 2^bounds[0], unit · 2^bounds[1]]."""
    _raise(values, at, unit * 2.0 ** bounds[0])
    values.scatter_reduce_(0, at, unit * 2.0 ** bounds[1], "amin")


def adjusted_scales(graph_module: fx.GraphModule) -> list[tuple[str, str]]:
    """Returns (site, change and reason) for every scale that sharing or bounds of shifts have moved.

    Args:
        graph_module: a prepared and calibrated graph with aligned scales.
    """
    backend = cast(Backend, graph_module.meta["backend"])
    if not backend.aligned and backend.shifts is None:
        return []
    together = {id(one): group for group in shared_groups(graph_module) for one in group}
    nodes = [node for node in graph_module.graph.nodes if is_quantizer(node)]
    sites = {id(module_of(node)): str(node.meta[QUANTIZES]) for node in nodes}
    lines = []
    for key, name in sites.items():
        quantizer = cast(FakeQuantize, next(module_of(n) for n in nodes if id(module_of(n)) == key))
        others = [sites[id(one)] for one in together.get(key, []) if id(one) in sites and id(one) != key]
        lines += _activation_line(quantizer, name, others)
    for node, operator, fake in quantized_operators(graph_module):
        if backend.shifts is None or fake.frozen or not fake.spec.powers_of_two:
            continue
        weight = operator.effective()[0].detach()
        wanted, scale = fake.unbounded(weight), fake.scale(weight)
        if not torch.equal(wanted, scale):
            moved = _moved(" of its weight", wanted, scale)
            lines.append((site(node), f"{moved}, to keep the shift within bounds"))
    return lines


def _activation_line(quantizer: FakeQuantize, name: str, others: Sequence[str]) -> list[tuple[str, str]]:
    own = quantizer.own_scale()
    if own is None or torch.equal(own, quantizer.scale):
        return []
    why = (
        f"because it is shared with {', '.join(others)}"
        if others
        else "to keep the shifts around it within bounds"
    )
    return [(name, f"{_moved('', own, quantizer.scale)}, {why}")]


def _moved(what: str, before: Tensor, after: Tensor) -> str:
    """Returns the change of a scale; of several scales, it is the largest change, with the number of changes."""
    first, last = (one.double().log2().flatten() for one in (before, after))
    apart = (last - first).abs()
    most = int(apart.argmax())
    change = f"from 2^{first[most]:g} to 2^{last[most]:g}"
    if len(apart) == 1:
        return f"the scale{what} was changed {change}"
    return f"{int(apart.count_nonzero())} of {len(apart)} scales{what} were changed (the most {change})"
