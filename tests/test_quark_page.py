"""Tests that each key in the second column of docs/quark.md exists and accepts the value shown.

`test_quark_cleaned.py`, `test_quark_quantized.py` and `test_quark_npus.py` run the rows.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import pytest
import test_quark_cleaned
import test_quark_npus
import test_quark_quantized
import yaml
from command_line import CONF
from quark_rows import CODE as _CODE
from quark_rows import KEYS as KEYS_OF
from quark_rows import RUN, page_rows

from qatkit.config.field_types import Setting, settings_of
from qatkit.config.fields import limit_of
from qatkit.config.schema import Config
from qatkit.config.schema.quantization import OverrideConfig

_OF_THE_SYSTEM = ("TMPDIR",)
_MOST_MISSING = 5


ROWS = list(page_rows())
KEYS = sorted({code for row in ROWS for code in _CODE.findall(row[1])})
# Code in the last column that looks like a configuration key.
MENTIONED = sorted(
    {
        code
        for code in _CODE.findall("\n".join(row[3] for row in ROWS))
        if re.match(r"[a-z_]+\.[a-z_.]+(=|$)|[a-z]+=", code)
    }
)


def _group(name: str) -> type | None:
    """Returns the dataclass of a group of settings, or None if there is no such group."""
    made = getattr(Config(), name, None)
    return type(made) if dataclasses.is_dataclass(made) else None


def _owner(key: str) -> tuple[type, str]:
    """Returns the dataclass that has a key, and the name of its field."""
    first, *rest = key.split(".")
    if not rest:
        return Config, first
    if first == "algorithm":
        name, field = rest
        text = yaml.safe_load((CONF / "algorithm" / f"{name}.yaml").read_text(encoding="utf-8"))
        module, _, target = text[name]["target"].rpartition(".")
        return getattr(importlib.import_module(module), target), field
    if key.startswith("backend.overrides.PATTERN."):
        return OverrideConfig, rest[-1]
    owner = _group(first)
    assert owner is not None and len(rest) == 1, f"{key} is no key"
    return owner, rest[0]


def _check(code: str) -> None:
    key, _, value = code.partition("=")
    if key in _OF_THE_SYSTEM:
        return
    if value and (CONF / key).is_dir():
        assert (CONF / key / f"{value}.yaml").is_file(), f"conf/{key} has no {value}.yaml"
        return
    owner, name = _owner(key)
    known: dict[str, Setting] = {setting.name: setting for setting in settings_of(owner)}
    fields = {one.name for one in dataclasses.fields(owner)}
    assert name in fields, f"{key}: {owner.__name__} has no {name}"
    if not value or name not in known:
        return
    given: Any = yaml.safe_load(re.sub(r":(?=[^ ])", ": ", value) if value.startswith("{") else value)
    if known[name].allowed:
        limit = limit_of(owner, name)
        assert limit.holds(given), f"{code}: expected {limit.expected()}"


@pytest.mark.parametrize("code", KEYS)
def test_a_key_beside_an_option_exists(code: str) -> None:
    _check(code)


@pytest.mark.parametrize("code", MENTIONED)
def test_a_key_that_is_mentioned_exists(code: str) -> None:
    _check(code)


def test_each_option_has_a_row_and_few_have_no_key() -> None:
    options = [option for row in ROWS for option in _CODE.findall(row[0])]
    assert len(options) == len(set(options))
    verdicts = [row[2] for row in ROWS]
    assert set(verdicts) == {"same", "better", "not"}
    assert verdicts.count("not") <= _MOST_MISSING
    assert all((row[1] == "-") == (row[2] == "not") for row in ROWS)
    assert all(row[3] for row in ROWS if row[2] in ("not", "better"))


def test_each_row_with_a_key_is_run_by_a_slow_test() -> None:
    tests = (test_quark_cleaned, test_quark_npus, test_quark_quantized)
    assert all(any(hasattr(module, name) for module in tests) for name in RUN.values())
    assert set(RUN) == {option for option, keys in KEYS_OF.items() if keys}
