"""Lowers an opset-18 model to an older opset, operator by operator.

torch's exporter supports opset 18 and higher. Each rule rewrites one form of an operator, and is stored with the opset
that introduced this form. It is applied only if a lower opset is requested, so that nothing else changes.

The rules are in two modules: `older_forms` writes older forms of the same operator, and `older_operators` writes
operators in terms of older ones. If an older form differs only in types, the operator gets Casts, provided that the
older types represent the same numbers. An operator that has neither a rule nor a form in the requested opset is
refused, and the error names the lowest opset that has a form.

Source of every difference: the operator changelog of the ONNX specification.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir import tape

from qatkit.export.node_names import place
from qatkit.export.older_forms import FORMS, Newer
from qatkit.export.older_operators import OPERATORS
from qatkit.export.rewrite import MICROSOFT, Rule, rewrite, subgraphs
from qatkit_verify.errors import ConfigError

IR_VERSION = 8  # the oldest version with every type that is used here; ONNX Runtime 1.10 and later read it
_NEWEST = onnx.defs.onnx_opset_version()
_RULES: dict[str, list[tuple[int, Rule]]] = {**FORMS, **OPERATORS}


def lower(model: ir.Model, opset: int) -> None:
    """Rewrites a model in place so that it needs only `opset`.

    The model has opset 18, or `opset` if this is higher. In the second case, only operators in forms newer than `opset`
    change (16-bit quantizers before 21).

    Raises:
        ConfigError: a node needs a higher opset; the message names the node and the lowest opset that has it.
    """
    rules = {
        kind: [_applied(rule, since, opset) for since, rule in forms if opset < since]
        for kind, forms in _RULES.items()
    }
    rewrite(model.graph, rules)
    _refuse_newer(model.graph, opset)
    model.opset_imports[""] = opset
    if any(node.domain == MICROSOFT for node in model.graph):
        model.opset_imports.setdefault(MICROSOFT, 1)
    model.ir_version = IR_VERSION if opset <= 18 else model.ir_version


def _applied(rule: Rule, since: int, opset: int) -> Rule:
    """Returns the rule with error messages that name the requested opset and the opset that the node needs."""

    def apply(node: ir.Node, builder: tape.Tape) -> object:
        try:
            return rule(node, builder)
        except Newer as error:
            reason = f"{place(node)} {error}, which needs opset {since} or higher"
            raise ConfigError("export.opset", opset, reason=reason) from None

    return apply  # type: ignore[return-value]


def _refuse_newer(graph: ir.Graph, opset: int) -> None:
    for node in graph:
        for inner in subgraphs(node):
            _refuse_newer(inner, opset)
        if node.domain or (_known(node, opset) and not _untyped(node, opset)):
            continue
        able = [n for n in range(opset + 1, _NEWEST + 1) if _known(node, n) and not _untyped(node, n)]
        if able:
            kind = "" if not _known(node, opset) else f" of {_untyped(node, opset)}"
            reason = f"{place(node)}: this form of {node.op_type}{kind} needs opset {able[0]} or higher"
            raise ConfigError("export.opset", opset, reason=reason)


def _known(node: ir.Node, opset: int) -> bool:
    """Returns whether `opset` has the operator with the node's attributes and number of inputs."""
    if not onnx.defs.has(node.op_type, opset, ""):
        return False
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    return schema.attributes.keys() >= node.attributes.keys() and len(node.inputs) <= schema.max_input


def _untyped(node: ir.Node, opset: int) -> str:
    """Returns the type of the first input that the operator does not accept in `opset`.

    Returns "" if all types are accepted or unknown.
    """
    formal = onnx.defs.get_schema(node.op_type, opset, "").inputs
    for i, value in enumerate(node.inputs):
        if value is None or not isinstance(value.type, ir.TensorType):
            continue
        kind = str(value.type.dtype).lower()
        if f"tensor({kind})" not in formal[min(i, len(formal) - 1)].types:
            return kind
    return ""
