"""Tests of README.md and the pages of docs/: size, links, and the configuration of each command.

`test_documented_commands.py` runs the commands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_commands import DOCS, PAGES, README, ROOT, Command, all_commands, files, label

from qatkit.cli.export_command import export_run
from qatkit.cli.train_command import train_run
from qatkit.config.compose import compose_config

LINK = re.compile(r"\]\(([^)\s]+)\)")
GENERATED = {"docs/models/odd.md"}
# Keys whose value only the reader can provide, except the files that a page shows (my_NAME).
BROUGHT = re.compile(r"(data\.root|model\.checkpoint|model\.name)=(?!my_)|launcher=|://")


def test_the_readme_fits_on_a_screen_or_three() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert len(text.encode()) <= 9_000


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_a_page_is_short_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if label(page) not in GENERATED:
        assert len(text.splitlines()) <= 250
    targets = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    missing = [target for target in targets if target and not (page.parent / target).exists()]
    assert not missing


def test_every_page_of_the_guides_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES if page != README]
    assert not [page for page in pages if page not in navigation]


COMMANDS = list(all_commands())


def test_a_command_with_data_of_the_reader_says_so() -> None:
    """The comment of a command that needs something of the reader's ends like `# needs ImageNet`."""
    assert len(COMMANDS) > 60
    silent = [one.text for one in COMMANDS if one.needs is None and BROUGHT.search(one.text)]
    assert not silent


def _composed() -> list[tuple[Command, list[str]]]:
    """Returns each train.py and export.py step with its command."""
    programs = (["train.py"], ["export.py"])
    return [(one, step) for one in COMMANDS for step in one.steps if step[:1] in programs]


def test_scripts_of_the_site_are_files_of_its_own() -> None:
    """Offline search needs a script that the plugin would otherwise load from another host."""
    listed = re.findall(r"^  polyfills: \[(.*?)\]", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert listed == ["javascripts/iframe-worker/shim.js"]
    assert (DOCS / listed[0]).is_file()


@pytest.mark.parametrize(
    ("command", "step"),
    [pytest.param(*one, id=f"{one[0].page.stem}-{' '.join(one[1])}"[:70]) for one in _composed()],
)
def test_the_configuration_of_a_command_composes(
    command: Command, step: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, options and values are checked as on the command line; models and data need not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in files(command.page).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    Path("encodings.json").touch()
    program, *arguments = step
    typed = [
        one for one in arguments if not one.startswith(("-", "hydra.", "launcher="))
    ]  # launchers need an extra
    if "-m" in arguments:
        typed = [re.sub(r"^([\w.]+=[^,\[{]*),.*", r"\1", one) for one in typed]  # the first run of a sweep
    typed = [one.replace("recipe=NAME", "recipe=quickstart") for one in typed]
    if "OUTPUT_FOLDER" in command.text or "--config-dir" in arguments:
        pytest.skip("its configuration is that of a finished run, or of a folder of the reader's")
    adapt = export_run if program == "export.py" else train_run
    compose_config(ROOT / "conf", typed, adapt)
