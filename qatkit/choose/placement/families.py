"""Families of operators that change their type together, for measurements on machines that cannot export.

silu       SiLUs in int8, as Sigmoid and Mul           gates      squeeze-and-excitation in float
amx        weights of Convs stored for AMX
depthwise  depthwise Convs and their SiLUs in float    sums, cats residual sums, concatenations in float
stem       the first Conv or Linear in float           last       the last Conv or Linear in float
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from torch import Tensor, fx, nn

from qatkit.choose.placement.choices import Choices
from qatkit.choose.precision.layout import Layouts
from qatkit.graph.nodes import facts, module_of, op_class, site
from qatkit_verify.placement.sites import Sites


def families(graph: fx.Graph, layouts: Layouts, choices: Choices) -> dict[str, Sites]:
    """Returns the families by name that change the backend's placement of a graph and leave some operators int8.

    `amx`, which changes only how weights are stored, is among them if the backend supports it and there is a
    Conv.
    """
    known = set(choices.computing)
    nodes = [node for node in graph.nodes if site(node) in known]
    floats = {
        "depthwise": [
            n for node in nodes if _is_depthwise(node) for n in (node, *_silus_around(node, choices))
        ],
        "gates": [n for node in nodes if op_class(node) == "mul" for n in _gate(node)],
        "sums": [node for node in nodes if op_class(node) == "add"],
        "cats": [node for node in nodes if op_class(node) == "cat"],
    }
    found = {name: Sites(frozenset(map(site, chosen)) & known) for name, chosen in floats.items()}
    found |= {
        "stem": Sites(frozenset(layouts.operators[:1])),
        "last": Sites(frozenset(layouts.operators[-1:])),
        "silu": Sites(opened=choices.islands),
    }
    found = {name: sites for name, sites in found.items() if sites and _leaves_something(sites, layouts)}
    if choices.backend.has_amx and any(op_class(node) == "conv" for node in nodes):
        found["amx"] = Sites(for_amx=True)
    return found


def combined(found: dict[str, Sites]) -> Iterator[tuple[str, Sites]]:
    """Yields (name, sites) of each single family, of each pair, and of all families together.

    A SiLU that is float in one of the families is float in their combination.
    """
    names = sorted(found)
    sets = [*((name,) for name in names), *itertools.combinations(names, 2)]
    for chosen in [*sets, *([tuple(names)] if len(names) > 2 else [])]:
        floats = frozenset[str]().union(*(found[name].floats for name in chosen))
        opened = frozenset[str]().union(*(found[name].opened for name in chosen))
        yield "+".join(chosen), Sites(floats, opened - floats, any(found[name].for_amx for name in chosen))


def _leaves_something(sites: Sites, layouts: Layouts) -> bool:
    """Returns whether some operators stay int8 and the layout differs from the table's."""
    layout = layouts(sites.floats, sites.opened)
    return len(layout.floats) < len(layouts.operators) and layout != layouts(())


def _is_depthwise(node: fx.Node) -> bool:
    module = module_of(node) if node.op == "call_module" else None
    return op_class(node) == "conv" and isinstance(module, nn.Module) and getattr(module, "groups", 1) > 1


def _silus_around(node: fx.Node, choices: Choices) -> list[fx.Node]:
    return [n for n in (*node.all_input_nodes, *node.users) if site(n) in choices.islands]


def _gate(product: fx.Node) -> list[fx.Node]:
    """Returns the operators of a gate: the product, and the operators from the pool to the value per channel."""
    small = [node for node in product.all_input_nodes if _is_one_pixel(node)]
    if len(small) != 1 or len(product.all_input_nodes) != 2:
        return []
    return [product, *_back(small[0], _is_one_pixel)]


def _back(node: fx.Node, within: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    while within(node) and node.op != "placeholder":
        yield node
        if len(node.all_input_nodes) != 1 or facts(node).name == "global_pool":
            return
        node = node.all_input_nodes[0]


def _is_one_pixel(node: fx.Node) -> bool:
    value = node.meta.get("value")
    return isinstance(value, Tensor) and value.ndim == 4 and tuple(value.shape[2:]) == (1, 1)
