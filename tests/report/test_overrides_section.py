"""Tests of the report page's section on overrides: each selector with its settings and matches."""

from __future__ import annotations

from qatkit.records.results import Results
from qatkit.report.overrides import overrides_section
from qatkit.report.page import render_page


def test_each_selector_is_shown_with_what_it_matched() -> None:
    names = [f'{{"a":{i}}}' for i in range(25)]
    matched = [
        {"selector": "re/<.*>", "settings": {"float": True}, "count": 25, "names": names},
        {"selector": "tensor/x:0", "settings": {"activation_range": [0, 6]}, "count": 1, "names": ["x:0"]},
    ]
    results = Results("run", "model", "out").with_measured("overrides", {"matched": matched})
    page = overrides_section(results)
    assert "<code>re/&lt;.*&gt;</code>" in page
    assert "{&quot;a&quot;:19} and 5 more" in page
    assert "activation_range: [0, 6]" in page
    assert page in render_page(results)
    assert results.as_dict()["measured"]["overrides"]["matched"] == matched


def test_a_run_without_selectors_has_no_section() -> None:
    assert overrides_section(Results("run", "model", "out")) == ""
