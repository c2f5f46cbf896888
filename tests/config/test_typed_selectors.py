"""Tests of selectors on the command line and in files: names with colons, dots, slashes, brackets or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qatkit.config.compose import compose_config, load_config, save_config
from qatkit.config.schema import Config, OverrideConfig
from qatkit.config.selectors import ends_of, every_override, shown
from qatkit.run.backend import backend_of
from qatkit_verify.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"
JSON_NAME = '{"a":1}'


def composed(*typed: str) -> Config:
    return compose_config(CONF, ["recipe=quickstart", *typed])


@pytest.mark.parametrize(
    ("typed", "selectors"),
    [
        ("backend.exclude=[layer.1.conv,op/Conv]", ["layer.1.conv", "op/Conv"]),
        ("backend.exclude=[/model/Conv_3,encoder.layers.*]", ["/model/Conv_3", "encoder.layers.*"]),
        ("backend.exclude=['net/conv:0','größe der 面']", ["net/conv:0", "größe der 面"]),
        ("backend.exclude=['block[0]','3']", ["block[0]", "3"]),
        (f"backend.exclude=['{JSON_NAME}']", [JSON_NAME]),
        ("backend.only=['re/.*\\.(q|k)_proj']", [r"re/.*\.(q|k)_proj"]),
    ],
)
def test_lists_take_any_name_in_quotes(typed: str, selectors: list[str]) -> None:
    backend = composed(typed).backend
    assert [*backend.exclude, *backend.only] == selectors


@pytest.mark.parametrize(
    ("typed", "selector"),
    [
        ("+backend.overrides={net/conv\\:0:{float:true}}", "net/conv:0"),
        ("+backend.overrides={block\\[0\\]:{float:true}}", "block[0]"),
        ("+backend.overrides={a b/c.d:{float:true}}", "a b/c.d"),
        ("+backend.overrides={re/conv.?:{float:true}}", "re/conv.?"),
        ("+backend.overrides={input/0/conv1:{activation_dtype:int8}}", "input/0/conv1"),
    ],
)
def test_keys_take_a_backslash_before_what_hydra_reads(typed: str, selector: str) -> None:
    assert list(composed(typed).backend.overrides) == [selector]


def test_subgraphs_are_typed_with_their_ends() -> None:
    typed = (
        "+backend.subgraphs={head:{from:[a,b],to:relu9}}",
        "+backend.overrides={subgraph/head:{float:true}}",
    )
    found = every_override(composed(*typed, "backend.exclude=[{from:[c],to:[d]}]").backend)
    assert next(map(shown, found)) == "subgraph/head"
    assert [ends_of(one) for one in found] == [
        {"name": "head", "from": ["a", "b"], "to": ["relu9"]},
        {"from": ["c"], "to": ["d"]},
    ]


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_holds_what_cannot_be_typed(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"mine.{suffix}"
    held = {JSON_NAME: {"float": True}, "conv1": {"weight_scale": [0.1, 0.2]}, "fc": {"float": True}}
    file.write_text(json.dumps(held))
    config = composed(f"backend.overrides_file={file}", "+backend.overrides={fc:{weight_dtype:int4}}")
    assert config.backend.overrides == {
        JSON_NAME: OverrideConfig(float=True),
        "conv1": OverrideConfig(weight_scale=[0.1, 0.2]),
        "fc": OverrideConfig(weight_dtype="int4"),
    }
    assert config.backend.overrides_file is None
    save_config(config, tmp_path / "config.yaml")
    file.unlink()
    assert load_config(tmp_path / "config.yaml").backend == config.backend


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "expected a YAML or JSON file with"),
        ("{conv1: 3}", "expected a YAML or JSON file with"),
        ("{conv1: {float: 2}}", r"^backend\.overrides\.conv1\.float=2: expected true or false$"),
        ("{conv1: {flot: true}}", "did you mean backend.overrides.conv1.float"),
        ("{", r"the file cannot be read \(while parsing"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        composed(f"backend.overrides_file={file}")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ["+backend.overrides={conv1:{activation_axis:0}}"],
            "activation_axis=.*does not exist .*activation_",
        ),
        (["+backend.overrides={conv1:{activation_range:[3,-3]}}"], "activation_range=.*LOW < HIGH"),
        (["+backend.subgraphs={head:{from:[a]}}"], "backend.subgraphs.head=.*expected {from"),
        (["backend.exclude=[conv1,7]"], "backend.exclude=7: expected a name, .*with quotes"),
    ],
)
def test_mistakes_are_told_before_a_model_is_built(typed: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        composed(*typed)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            ["backend=simulated", "+backend.overrides={conv1:{activation_range:[0,6]}}"],
            "null with backend=simulated",
        ),
        (
            ["backend=weight_only", "+backend.overrides={conv1:{activation_scale:0.1}}"],
            "activation_scale=0.1: expected null with this backend",
        ),
    ],
)
def test_a_backend_without_such_scales_refuses_them(typed: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        backend_of(composed(*typed))


def test_export_modes_without_a_graph_take_no_selectors() -> None:
    typed = ("schedule=calibrate_only", "export.mode=float16", "backend.exclude=[conv1]")
    with pytest.raises(
        ConfigError, match=r"backend.exclude=\[conv1\]: expected \[\] with export.mode=float16"
    ):
        composed(*typed)
