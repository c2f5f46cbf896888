"""Tests of the model card's figures and limits against the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from qatkit.handover.card import card
from qatkit.records.results import Audit, Fidelity, NodeAudit, Results
from qatkit.tasks import task_of
from qatkit_verify.classification import classified
from qatkit_verify.records import Hardware, TaskNames


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


DEMO = Results("demo", "my_net", "", config={"verify": {}, "data": {"source": "my.pictures"}})


def _text(results: Results, *, arrays: dict[str, Any] | None = None, **more: Any) -> str:
    return card(json.loads(json.dumps(results.as_dict())), results.classes, "", arrays, **more)


def _limits(results: Results, **more: Any) -> list[str]:
    section = _text(results, **more).partition("## Limits\n\n")[2].partition("\n\n")[0]
    return [line.removeprefix("- ").replace("\\", "") for line in section.splitlines()]


def test_limits_of_a_run_that_measured_nothing_say_only_that() -> None:
    assert _limits(DEMO) == [
        "Accuracy was not measured.",
        "Not checked: saturation on x86 CPUs without VNNI.",
        "Not checked: parity.",
        "Not checked: audit.",
    ]


def test_limits_name_data_processor_drop_and_form_of_the_file() -> None:
    scores = {
        "float": classified(80.0, None, 10, (4, 4, 2), (4, 2, 2)),
        "int8": classified(70.0, None, 10, (4, 4, 2), (4, 2, 1)),
    }
    results = replace(
        DEMO, accuracy=scores, classes=("cat", "dog", "owl"), fixed_batch=4, versions={"onnxruntime": "1.31.1"},
        hardware=Hardware("EPYC", 2, ("avx2", "avx512_vnni"), 2, "Linux"), skipped=[("neck", "unknown operator")],
        config={"verify": {"max_drop": 1.0, "min_speedup": None}, "data": {"source": "my.pictures"}},
    )  # fmt: skip
    assert _limits(
        results, requires={"onnxruntime": "1.23", "opset": 13}, shapes={"x": ["n", 3, 8, 8], "flags": ["n"]}
    ) == [
        "These bounds were not set: verify.min_speedup.",
        "Measured on 10 test images of my.pictures.",
        "The largest drop of a class is 50.0 points in top-1: class owl, 2 test images.",
        "Checked in ONNX Runtime on one CPU: EPYC (avx2, avx512_vnni), with VNNI.",
        "Not checked: saturation on x86 CPUs without VNNI.",
        "Left in float or skipped: neck: unknown operator",
        "The file accepts only batches of 4.",
        "Input x accepts only the shape [n, 3, 8, 8], with any size for n.",
        "Opset 13 needs ONNX Runtime 1.23 or newer; measured with 1.31.1.",
        "Not checked: parity.",
        "Not checked: audit.",
    ]


def test_limits_name_a_float_model_at_chance_level() -> None:
    untrained = classified(30.0, None, 10, (4, 4, 2), (1, 1, 1))
    said = _limits(replace(DEMO, accuracy={"float": untrained, "int8": untrained}))
    assert any(
        line.startswith("Float top-1 of 30.00 % is not measurably better than one answer") for line in said
    )


def test_limits_without_labels_name_the_farthest_output() -> None:
    results = replace(
        DEMO, labelled=False, task=task_of("outputs").names,
        fidelity={"int8": Fidelity(1.0, None, 20.0, 24)},
        measured={"outputs": {"outputs": [{"name": "a", "sqnr_db": 30.0}, {"name": "b", "sqnr_db": 12.34}]}},
    )  # fmt: skip
    said = _limits(results)
    assert "Measured on 24 test images of my.pictures without labels." in said
    assert "The output farthest from float's is b, with an SQNR of 12.3 dB." in said
    drawn = replace(results, config={"verify": {}, "data": {"source": "qatkit.data.drawn.drawn"}})
    assert "Measured on 24 random samples, not on real data." in _limits(drawn)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"layers": {"a": {"can_saturate": 0}}}, "No int8 operator can saturate on x86 CPUs without VNNI"),
        (
            {"layers": {"a": {"can_saturate": 3}}},
            "On x86 CPUs without VNNI, 1 operator may saturate; the effect",
        ),
        (
            {"layers": {"a": {"can_saturate": 3}}, "emulated": {"agreement": 0.995}, "images": 256},
            "Without VNNI, 99.50 % of the decisions on 256 test images stay the same (emulated).",
        ),
        ({"elsewhere": True}, "Not checked: saturation on x86 CPUs without VNNI."),
    ],
)
def test_limits_tell_what_is_known_of_saturation(figures: dict[str, Any], said: str) -> None:
    if "layers" in figures:
        figures = {"emulated": None, "others": [], "images": 0, **figures}
    (line,) = [one for one in _limits(replace(DEMO, measured={"saturation": figures})) if "VNNI" in one]
    assert line.startswith(said)


def test_limits_name_operators_that_are_not_in_int8() -> None:
    nodes = tuple(
        NodeAudit(name, "MatMul", "", kind, name, "", False, macs, None)
        for name, kind, macs in (("a", "int8", 75), ("b", "float", 25), ("c", "float", 0))
    )
    audit = Audit(nodes, {}, 0, 0, 0, (), 100, 75, ())
    assert "25.0 % of the multiply-accumulates are not in int8: 1 MatMul." in _limits(
        replace(DEMO, audit=audit)
    )


@pytest.mark.parametrize(
    ("task", "arrays", "tag"),
    [
        ("classification", None, "pipeline_tag: image-classification\n"),
        ("classification", {}, ""),
        ("text_pairs", {}, "pipeline_tag: sentence-similarity\n"),
        ("outputs", None, ""),
        ("regression", None, ""),
    ],
)
def test_only_a_task_that_is_known_has_a_tag(task: str, arrays: dict[str, Any] | None, tag: str) -> None:
    text = _text(replace(DEMO, task=task_of(task).names), arrays=arrays)
    assert text.startswith(f"---\nlibrary_name: onnx\n{tag}tags:\n")
    own = TaskNames("mine.Task", "image classification", DEMO.task.metrics)
    assert "pipeline_tag" not in _text(replace(DEMO, task=own))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("onnx//home/me/secret/net.onnx", "net"),
        ("/home/me/net.onnx", "net"),
        ("hf//home/me/bert", "bert"),
        ("my_package.models.Net", "Net"),
        ("my_package.models:build", "build"),
        ("qatkit.one_call.given_model", "demo"),
        ("timm/resnet18.a1_in1k", "timm/resnet18.a1_in1k"),
        ("hf/google/vit-base", "hf/google/vit-base"),
        ("resnet18", "resnet18"),
    ],
)
def test_a_model_is_named_without_local_paths(model: str, name: str) -> None:
    text = _text(replace(DEMO, model=model))
    assert f'- "{name}"\n---\n' in text and "/home" not in text
