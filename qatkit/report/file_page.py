"""The sections of the page on the file: its audit node by node, and its parity with the converted module."""

from __future__ import annotations

from html import escape

from qatkit.records.results import Audit, Divergence, NodeAudit, Parity, Results
from qatkit.report.html import chip, section, table
from qatkit.verify.checks.audit import audit_line
from qatkit.verify.checks.parity import agreement, divergence_line
from qatkit_verify.records import TaskNames


def audit_section(results: Results) -> str:
    """Returns the section; "" if there was no audit."""
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


_TENSORS = 200  # number of rows in the tensor table; the others are in report.json


def parity_section(results: Results) -> str:
    """Returns the section with the parity and the comparison of tensors; "" if neither was measured."""
    tensors = "" if results.divergence is None else _tensors(results.divergence)
    if results.parity is None:
        return section("Tensor by tensor", tensors) if tensors else ""
    return section(
        f"Parity with {results.parity.reference}", _parity_table(results.parity, results.task), tensors
    )


def _parity_table(parity: Parity, task: TaskNames) -> str:
    head = ("", f"same {task.alike}", "max difference", "mean difference", "max, steps", "mean, steps")
    rows = [
        (
            "",
            [
                label,
                agreement(item),
                f"{item.max_abs:.3g}",
                f"{item.mean_abs:.3g}",
                f"{item.max_steps:.2f}",
                f"{item.mean_steps:.3f}",
            ],
        )
        for label, item in parity.compared
    ]
    note = f"{parity.images:,} {task.samples}. One step is {parity.step:.4g} ({parity.step_source})."
    return f'<p class="soft">{escape(note)}</p>' + table(head, rows)


def _tensors(divergence: Divergence) -> str:
    rows = [
        (
            "problem" if tensor.max_steps > divergence.tolerance else "",
            [
                f'<td class="name"><code>{escape(tensor.name)}</code></td>',
                f"{tensor.elements:,}",
                f"{100 * tensor.mismatching:.4f} %",
                str(tensor.max_steps),
            ],
        )
        for tensor in divergence.tensors[:_TENSORS]
    ]
    head = ("tensor, in order", "elements", "differing", "max, steps")
    return (
        f"<p>{escape(divergence_line(divergence))}.</p><details><summary>Every tensor</summary>"
        + table(head, rows, "dense")
        + "</details>"
    )
