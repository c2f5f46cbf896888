"""Selectors: texts that choose operators or tensors by name (`docs/overrides.md`), and the meaning of lists of them.

    conv1, layer1.*      an operator's name, or a glob over names
    re/PATTERN           a regular expression over whole names
    op/linear, op/Gemm   a class of operators, or an operator type of a given ONNX file
    subgraph/NAME        every operator on a path between two sets; `backend.subgraphs` defines NAME
    tensor/NAME          a tensor, by its name
    input/K/SELECTOR     the K-th input of the operators that another selector chooses

`backend.exclude` and `backend.only` become overrides, so that later code only has to handle overrides. A
selector that is not a plain text is stored as JSON after its prefix: a subgraph with its ends, or the
operators that `only` selects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qatkit.config.schema import BackendConfig, OverrideConfig
from qatkit_verify.errors import ConfigError, did_you_mean

EXPRESSION, CLASS, SUBGRAPH = "re/", "op/", "subgraph/"
TENSOR, INPUT, ONLY = "tensor/", "input/", "only/"
_ENDS = ("from", "to")
_ALLOWED = "a name, a glob, re/PATTERN, op/TYPE, subgraph/NAME or {from: [...], to: [...]}"


def every_override(backend: BackendConfig) -> dict[str, OverrideConfig]:
    """Returns all overrides in ascending precedence: those of the user, that of `only`, and those of `exclude`.

    In selectors of the user's subgraphs, the name is replaced by the ends of the subgraph. Selectors are checked
    here, before the model is loaded.

    Raises:
        ConfigError: a selector cannot be read, or `backend.subgraphs` does not define its subgraph.
    """
    found = {_written_out("backend.overrides", name, backend): one for name, one in backend.overrides.items()}
    if backend.only:
        inside = [_written_out("backend.only", one, backend) for one in backend.only]
        found[ONLY + json.dumps(inside, ensure_ascii=False)] = OverrideConfig(float=True)
    excluded = [_written_out("backend.exclude", one, backend) for one in backend.exclude]
    return {name: one for name, one in found.items() if name not in excluded} | {
        name: OverrideConfig(float=True) for name in excluded
    }


@contextmanager
def naming_the_list(backend: BackendConfig) -> Iterator[None]:
    """Makes errors of selectors in `exclude` name that list instead of the overrides made from it."""
    try:
        yield
    except ConfigError as error:
        excluded = [_written_out("backend.exclude", one, backend) for one in backend.exclude]
        if error.key != "backend.overrides" or error.value not in excluded:
            raise
        raise ConfigError("backend.exclude", shown(str(error.value)), reason=error.problem) from error


def shown(selector: str) -> str:
    """Returns a selector in the form in which users write it."""
    if selector.startswith(ONLY):
        return "backend.only"
    ends = ends_of(selector)
    return selector if ends is None or "name" not in ends else f"{SUBGRAPH}{ends['name']}"


def ends_of(selector: str) -> dict[str, Any] | None:
    """Returns {from: [...], to: [...]} of a subgraph that is written out, with its name if it has one.

    For other selectors it returns None.
    """
    if not selector.startswith(f"{SUBGRAPH}{{"):
        return None
    try:
        ends = json.loads(selector.removeprefix(SUBGRAPH))
    except ValueError:
        return None
    return ends if isinstance(ends, dict) and set(_ENDS) <= ends.keys() else None


def check_expression(key: str, selector: str) -> None:
    """Rejects a regular expression that Python cannot read.

    Raises:
        ConfigError: the expression is wrong; the message gives the position of the error.
    """
    if EXPRESSION not in selector:
        return
    _, _, pattern = selector.partition(EXPRESSION)
    if selector.startswith((EXPRESSION, f"{TENSOR}{EXPRESSION}")):
        try:
            re.compile(pattern)
        except re.error as error:
            reason = f"the regular expression is invalid ({error})"
            raise ConfigError(key, selector, reason=reason) from error


def _written_out(key: str, given: object, backend: BackendConfig) -> str:
    """Returns the text of a selector; for a subgraph it includes the ends."""
    if isinstance(given, Mapping):
        return SUBGRAPH + _ends(key, given, {})
    if not isinstance(given, str) or not given:
        raise ConfigError(key, given, f"{_ALLOWED}, with quotes around numbers, true and false")
    if key != "backend.overrides" and given.startswith((TENSOR, INPUT)):
        raise ConfigError(
            key, given, f"a selector of operators ({_ALLOWED}); only backend.overrides selects tensors"
        )
    check_expression(key, given)
    if not given.startswith(SUBGRAPH) or ends_of(given) is not None:
        return given
    name = given.removeprefix(SUBGRAPH)
    if name not in backend.subgraphs:
        known = [f"{SUBGRAPH}{one}" for one in backend.subgraphs]
        added = f"; add it with '+backend.subgraphs={{{name}:{{from:[SELECTOR],to:[SELECTOR]}}}}'"
        reason = f"backend.subgraphs has no {name}{did_you_mean(given, known) or added}"
        raise ConfigError(key, given, reason=reason)
    return SUBGRAPH + _ends(f"backend.subgraphs.{name}", backend.subgraphs[name], {"name": name})


def _ends(key: str, given: object, named: dict[str, Any]) -> str:
    """Returns the ends of a subgraph as JSON."""
    allowed = "{from: [SELECTOR, ...], to: [SELECTOR, ...]}"
    if not isinstance(given, Mapping) or set(given) != set(_ENDS):
        raise ConfigError(key, given, allowed)
    for end in _ENDS:
        names = _listed(given[end])
        if not names or not all(isinstance(one, str) and one for one in names):
            raise ConfigError(f"{key}.{end}", given[end], "a selector or a list of selectors (strings)")
        for one in names:
            if one.startswith((TENSOR, INPUT, SUBGRAPH)):
                raise ConfigError(f"{key}.{end}", one, "operators, by name, glob, re/PATTERN or op/TYPE")
            check_expression(f"{key}.{end}", one)
        named = named | {end: names}
    return json.dumps(named, ensure_ascii=False)


def _listed(given: object) -> list[Any]:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]


def check_selectors(backend: BackendConfig) -> None:
    """Rejects selectors that can't be read, and subgraphs without ends.

    Raises:
        ConfigError: there is such a selector; the first one is reported.
    """
    for name, given in backend.subgraphs.items():
        _ends(f"backend.subgraphs.{name}", given, {})
    every_override(backend)


def refuse_selectors(backend: BackendConfig, beside: str) -> None:
    """Rejects selectors if the file is made by a tool that cannot select operators or tensors by name.

    Args:
        backend: the settings with the selectors.
        beside: the setting that selects the tool, such as "mode=dynamic".

    Raises:
        ConfigError: a list of selectors is not empty; the first one is reported.
    """
    for name, given in (
        ("overrides", backend.overrides),
        ("exclude", backend.exclude),
        ("only", backend.only),
    ):
        if given:
            typed: object = dict.fromkeys(given, "{...}") if name == "overrides" else given
            empty = "{}" if name == "overrides" else "[]"
            raise ConfigError(f"backend.{name}", typed, f"{empty} with {beside}")
