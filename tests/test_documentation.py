"""README.md and the pages of docs/: their size, their links, and the configuration behind each command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from qatkit.cli.export_command import export_run
from qatkit.cli.train_command import train_run
from qatkit.config.compose import compose_config

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FOLDERS = ("start", "guides", "deploy", "scale", "develop")
PAGES = [
    README,
    ROOT / "docs" / "index.md",
    *(page for one in FOLDERS for page in sorted((ROOT / "docs" / one).glob("*.md"))),
]
COMMAND = re.compile(r"^(?: {4}|)(?:pip install uv && )?uv run (train|export)\.py(?: (.*))?$")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def test_the_readme_fits_on_a_screen_or_three() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.encode()) <= 9_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    targets = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


def test_every_page_of_the_guides_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page != README]
    assert not [page for page in pages if page not in navigation]


def _commands() -> Iterator[tuple[str, str, list[str]]]:
    """Yields page, program and arguments of each command, continued lines joined, comments left out."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            if found := COMMAND.match(line):
                yield page.stem, found[1], shlex.split(found[2] or "", comments=True)


COMMANDS = list(_commands())


@pytest.mark.parametrize(
    ("page", "program", "arguments"), COMMANDS, ids=[f"{p}-{' '.join(a)}"[:70] for p, _, a in COMMANDS]
)
def test_the_configuration_of_a_command_composes(page: str, program: str, arguments: list[str]) -> None:
    """Keys, options and values are checked as on the command line; files and data need not exist."""
    sweep = "-m" in arguments
    typed = [
        one for one in arguments if not one.startswith(("-", "hydra.", "launcher="))
    ]  # a launcher is an extra
    if sweep:
        typed = [re.sub(r"^([\w.]+=[^,\[{]*),.*", r"\1", one) for one in typed]  # its first run
    if any("NAME" in one or "FILE" in one for one in typed) or "OUTPUT_FOLDER" in " ".join(typed):
        pytest.skip("a pattern of commands")
    adapt = export_run if program == "export" else train_run
    compose_config(ROOT / "conf", typed, adapt)
