"""Tests of the model card's figures against the report."""

from __future__ import annotations

import json

from qatkit.handover.card import card
from qatkit.records.results import Results
from qatkit_verify.classification import classified


def test_a_card_tells_the_figures_and_the_worst_classes() -> None:
    results = Results(
        "demo", "my_net", "", classes=("cat", "dog", "a|b"), shortfalls=["verify.max_drop=1.0: far"],
        accuracy={
            "float": classified(80.0, None, 10, (4, 4, 2), (4, 2, 2)),
            "int8": classified(70.0, None, 10, (4, 4, 2), (4, 2, 1)),
        },
    )  # fmt: skip
    text = card(json.loads(json.dumps(results.as_dict())), results.classes, "SNIPPET")
    assert text.startswith("---\nlibrary_name: onnx\n")
    assert '- "my_net"\n---\n' in text
    assert "license" not in text
    assert "INT8 against float: -10.00 points in top-1." in text
    assert "| dog | 50.0 | 50.0 | 4 |\n| a\\|b | 50.0 | 100.0 | 2 |\n| cat | 100.0 | 100.0 | 4 |" in text
    assert "A bound was not met: verify.max\\_drop=1.0: far" in text
    assert "Not checked: parity." in text
    assert text.endswith("## Load\n\nSNIPPET\n")
