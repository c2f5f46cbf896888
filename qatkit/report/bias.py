"""The section of the page on shifts of a regression's outputs: overall, and by ranges of the targets."""

from __future__ import annotations

from html import escape

from qatkit.records.fixes import either
from qatkit.records.results import Results
from qatkit.report.html import section, table
from qatkit.verify.checks.bias import NAME, BiasCheck, fixes_of, rows_of
from qatkit_verify.errors import counted

_COLUMNS = ("group", "samples", "mean shift", "+/- two standard errors", "of the deviation", "")


def bias_section(results: Results) -> str:
    """Returns the section; "" if no shift was measured."""
    found = results.measured.get(NAME)
    if found is None:
        return ""
    fix = either(fixes_of(results))
    said = f"Mean of {results.label} minus float on {counted(found['samples'], 'test sample')}."
    parts = [f'<p class="soft">{escape(said)}</p>']
    for one in found["outputs"]:
        rows = [("problem" if row[-1] else "", list(map(escape, row))) for row in rows_of(one, found["by"])]
        parts += [f"<h3>{escape(one['name'])}</h3>"] if one["name"] else []
        parts.append(table(_COLUMNS, rows, "dense"))
    if fix:
        parts.append(f"<p>To correct the shift: <code>{escape(fix)}</code></p>")
    elif all(not row[-1] for one in found["outputs"] for row in rows_of(one, found["by"])):
        parts.append(f"<p>{escape(BiasCheck().lines(results)[0])}</p>")
    return section("Shift against float", *parts)
