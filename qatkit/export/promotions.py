"""Finds the type promotions of an exported program without running it again.

Before torch's exporter translates a program, it runs every operator once more on tensors without values, to insert the
casts that type promotions imply (torch 2.13; 14 % of an export of MobileNetV2 in int8 by cProfile). For operators that
promote nothing (convolutions, matrix products, quantizers), this module reuses the results recorded in the program.
There is no public interface for this. If torch's pass differs from what is expected here, it runs unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from qatkit.export.replaced import replaced


@contextmanager
def promoted_where_needed() -> Iterator[None]:
    """Within the context of one export, reuses recorded results for operators that promote no types."""
    try:
        from torch.onnx._internal.fx.passes import type_promotion

        interpreter = type_promotion._TypePromotionInterpreter
        run, rule_of = vars(interpreter)["run_node"], type_promotion.get_type_promotion_rule
    except (ImportError, AttributeError, KeyError):
        yield
        return

    def run_where_needed(self: Any, node: fx.Node) -> Any:
        if node.op != "call_function" or "val" not in node.meta or rule_of(node, self.type_promotion_table):
            return run(self, node)
        return node.meta["val"]

    with replaced(interpreter, "run_node", run_where_needed):
        yield
