"""The pages of the documentation with their commands and Python blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(page for page in DOCS.rglob("*.md") if page.parent.name != "decisions")]

_PROGRAMS = ("uv", "pip", "python", "node", "eval", "qatkit", "qatkit-verify", "qatkit-measure")
_COMMAND = re.compile(rf"^ {{4}}(?=(?:{'|'.join(_PROGRAMS)}) )(.*?\S)(?:\s+# (.*))?$")
_BLOCK = re.compile(r"^```(\w+)\n(?:# ([\w/]+\.(?:py|yaml))\n)?(.*?)^```$", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"\bneeds (.+)$")
# Commands that change an environment; tests/test_wheel.py builds and installs the wheels.
_INSTALLERS = ("pip install", "uv sync", "uv build", "uv run pytest")


@dataclass(frozen=True)
class Command:
    """A command of a page; `needs` is what its comment asks the reader to provide ("ImageNet")."""

    page: Path
    text: str
    needs: str | None

    @property
    def steps(self) -> list[list[str]]:
        """Returns the arguments of each program that the command runs, without `uv run` and without installers."""
        parts = [part.strip() for part in self.text.split(" && ")]
        return [
            shlex.split(part.removeprefix("uv run ")) for part in parts if not part.startswith(_INSTALLERS)
        ]


def commands(page: Path) -> list[Command]:
    """Returns the commands of a page in order, with continued lines joined."""
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text(encoding="utf-8"))
    found = (_COMMAND.match(line) for line in text.splitlines())
    return [Command(page, one[1], _needs(one[2] or "")) for one in found if one]


def _needs(comment: str) -> str | None:
    found = _NEEDS.search(comment)
    return found[1] if found else None


def files(page: Path) -> dict[str, str]:
    """Returns the files that a page shows: blocks whose first line is a comment with the file's name."""
    return {name: text for _, name, text in _blocks(page) if name}


def python_blocks(page: Path) -> list[str]:
    """Returns the Python blocks of a page that are not files."""
    return [text for language, name, text in _blocks(page) if language == "python" and not name]


def _blocks(page: Path) -> list[tuple[str, str, str]]:
    """Returns the language, file name ("" for none) and text of each fenced block."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def all_commands() -> Iterator[Command]:
    """Yields the commands of every page."""
    for page in PAGES:
        yield from commands(page)


def label(page: Path) -> str:
    """Returns a page's path within the project."""
    return page.relative_to(ROOT).as_posix()
