"""Parity and the tensors between on the page: how far the file is from the converted module."""

from __future__ import annotations

from html import escape

from qatkit.records.results import Divergence, Parity, Results
from qatkit.report.html import section, table
from qatkit.verify.checks.parity import agreement, divergence_line
from qatkit_verify.records import TaskNames

_TENSORS = 200  # rows of the tensor table; the rest is in report.json


def parity_section(results: Results) -> str:
    """The section; "" where neither was measured."""
    tensors = "" if results.divergence is None else _tensors(results.divergence)
    if results.parity is None:
        return section("Tensor by tensor", tensors) if tensors else ""
    return section(
        f"Parity with {results.parity.reference}", _parity_table(results.parity, results.task), tensors
    )


def _parity_table(parity: Parity, task: TaskNames) -> str:
    head = ("", f"same {task.decision}", "max difference", "mean difference", "max, steps", "mean, steps")
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
    note = f"{parity.images:,} images. One step is {parity.step:.4g} ({parity.step_source})."
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
