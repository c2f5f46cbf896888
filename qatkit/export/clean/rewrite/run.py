"""Lists the rewrites by name, in the order in which they are applied, and applies them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import onnx_ir as ir
from onnx_ir.passes import common

from qatkit.export.clean.graphs import graphs
from qatkit.export.clean.rewrite import dpu, layers, norms, pairs, pools
from qatkit.export.clean.shapes import infer
from qatkit.export.quiet import quiet
from qatkit_verify.errors import ConfigError

Rewrite = Callable[[ir.Model, ir.Graph, ir.Node], bool]

SAME: Mapping[str, Rewrite] = {
    "layer_norm": norms.layer_norm,
    "instance_norm": norms.instance_norm,
    "l2_norm": norms.l2_norm,
    "gelu": layers.gelu,
    "relu": layers.relu,
    "batch_norm_of_concat": layers.batch_norm_of_concat,
    "batch_norm_to_conv": layers.batch_norm_to_conv,
    "mean_to_pool": pools.mean_to_pool,
    "split_pool": pools.split_pool,
    "split_to_slice": pools.split_to_slice,
    "fold_relu": pairs.fold_relu,
    "bfloat16_clip": pairs.bfloat16_clip,
    "dedicated_pairs": pairs.dedicated_pairs,
    "weight_pairs": pairs.weight_pairs,
}
APPROXIMATE: Mapping[str, Rewrite] = {
    "relu6": dpu.relu6,
    "leaky_relu": dpu.leaky_relu,
    "sigmoid": dpu.sigmoid,
    "hard_sigmoid": dpu.hard_sigmoid,
    "average_pool": dpu.average_pool,
    "reduce_mean": dpu.reduce_mean,
    "clip": dpu.clip,
    "softmax": dpu.softmax,
}
EXACT = frozenset(
    ("relu", "split_to_slice", "fold_relu", "bfloat16_clip", "dedicated_pairs", "weight_pairs")
)  # these keep every value
_OPSETS = {"layer_norm": 17, "gelu": 20}


def rewrite(model: ir.Model, asked: Collection[str], rules: Mapping[str, Rewrite], key: str) -> list[str]:
    """Replaces operators in all graphs of a model.

    Args:
        model: the model, changed in place.
        asked: the names of the rewrites to apply.
        rules: all rewrites by name, in the order in which they are applied.
        key: the key of the setting, for messages.

    Returns:
        A line for each rewrite, with the number of operators that it replaced.

    Raises:
        ConfigError: the new operator does not exist in the file's opset.
    """
    opset = model.opset_imports.get("", 0)
    for name in asked:
        if opset < _OPSETS.get(name, 0):
            least = _OPSETS[name]
            reason = (
                f"the operator needs opset {least}, and the file has opset {opset}; set clean.opset={least}"
            )
            raise ConfigError(key, name, reason=reason)
    if not asked:
        return []
    with quiet():
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        infer(model)
        counts = {name: _replaced(model, rule) for name, rule in rules.items() if name in asked}
        common.RemoveUnusedNodesPass()(model)
    return [f"{name}: {count} replaced" for name, count in counts.items()]


def _replaced(model: ir.Model, rule: Rewrite) -> int:
    found = 0
    for graph in graphs(model.graph):
        for node in list(graph):
            if node.graph is graph and not node.domain:
                found += rule(model, graph, node)
    infer(model)  # the next rule reads sizes
    return found
