"""The audit on the page: what runs in which precision, node by node."""

from __future__ import annotations

from html import escape

from qatkit.records.results import Audit, NodeAudit, Results
from qatkit.report.html import chip, section, table
from qatkit.verify.checks.audit import audit_line


def audit_section(results: Results) -> str:
    """The section; "" where there was no audit."""
    audit = results.audit
    if audit is None:
        return ""
    line = audit_line(audit).removeprefix("audit: ")
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in audit.problems)
    verdict = (
        f"<h3>Problems</h3><ul>{problems}</ul>" if problems else f"<p>{chip('good', 'no problem found')}</p>"
    )
    shown = "open" if len(audit.nodes) <= 120 else ""
    return section(
        "Audit of the graph that ONNX Runtime runs" if audit.for_onnxruntime else "Audit of the file",
        f"<p>{escape(line)}.</p>{verdict}",
        f"<details {shown}><summary>Every node</summary>{_nodes(audit)}</details>",
    )


def _nodes(audit: Audit) -> str:
    total = sum(node.microseconds or 0.0 for node in audit.nodes) or 1.0
    head = ("node", "operator", "precision", "MACs", "time", "why not int8")
    return table(head, [_node_row(node, audit.macs or 1, total) for node in audit.nodes], "dense")


def _node_row(node: NodeAudit, macs: int, total: float) -> tuple[str, list[str]]:
    kind = {"int8": "good", "float": "warn"}.get(node.precision, "plain")
    time = f"{100 * node.microseconds / total:.1f} %" if node.microseconds is not None else "-"
    return "problem" if node.problem else "", [
        f'<td class="name"><code>{escape(node.source or node.name)}</code></td>',
        f'<td class="left">{escape(node.op)}</td>',
        chip("bad" if node.problem else kind, node.precision),
        f"{100 * node.macs / macs:.1f} %" if node.macs else "",
        time,
        f'<td class="left why">{escape(node.reason)}</td>',
    ]
