"""Tests of warnings: they name the user's line, however many frames of qatkit and other libraries lie below it."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qatkit
from qatkit.warning import QatkitWarning, warn

PACKAGE = Path(qatkit.__file__).parent


def _function(path: Path, call: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `call` and whose code lies in the file `path`."""
    names: dict[str, Any] = {"call": call, "__name__": path.stem}
    exec(compile("def function():\n    call()\n", str(path), "exec"), names)
    function: Callable[[], None] = names["function"]
    return function


@pytest.mark.parametrize("name", ["lightning.loop", "torch.nn.modules.module", "contextlib"])
def test_a_warning_names_the_line_that_called_qatkit(name: str) -> None:
    library = Path("/site-packages") / f"{name}.py"
    hook = _function(PACKAGE / "train" / "hook.py", lambda: warn("told"))
    entry = _function(library, _function(PACKAGE / "entry.py", _function(library, hook)))
    with pytest.warns(QatkitWarning, match="told") as caught:
        entry()
    (found,) = caught
    assert found.filename == __file__
    assert linecache.getline(found.filename, found.lineno).strip() == "entry()"


def test_a_package_with_a_similar_name_is_the_users() -> None:
    similar = PACKAGE.with_name("qatkit_of_mine") / "train.py"
    with pytest.warns(QatkitWarning) as caught:
        _function(similar, _function(PACKAGE / "entry.py", lambda: warn("told")))()
    assert [one.filename for one in caught] == [str(similar)]


def test_every_warning_is_given_by_one_function() -> None:
    own = PACKAGE / "warning.py"
    others = {path for path in PACKAGE.rglob("*.py") if "warnings.warn" in path.read_text("utf-8")} - {own}
    assert not others
