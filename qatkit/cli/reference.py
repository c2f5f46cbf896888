"""The reference of all configuration keys: `--help` on the terminal, and docs/configuration.md with pages for groups.

Both are generated from the fields of the schema.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from qatkit.config.field_types import Setting, settings_of
from qatkit.config.fields import Place
from qatkit.config.schema import Config, OverrideConfig
from qatkit_verify.dotted import resolve
from qatkit_verify.errors import ConfigError
from qatkit_verify.untrusted import read_yaml

_FLAGS = (
    ("-m", "a sweep: KEY=A,B runs every combination"),
    ("--cfg job", "print the configuration that the command line makes, and stop"),
    ("--config-dir DIR", "a folder with your own options, searched like conf/"),
    ("--hydra-help", "all of Hydra's flags"),
)
_WIDTH = 110


@dataclass(frozen=True)
class Group:
    """A group of keys with a common prefix; `key` is "" for the keys of the root."""

    key: str
    about: str
    settings: tuple[Setting, ...]

    def full_key(self, setting: Setting) -> str:
        """Returns the key of a setting as it is typed."""
        return f"{self.key}.{setting.name}".lstrip(".")


def groups(folders: Iterable[Path]) -> list[Group]:
    """Returns all groups of keys in the order of the schema, including each algorithm with a file in `folders`.

    Raises:
        ConfigError: an algorithm's file cannot be read or is not valid YAML, or its target cannot be imported.
    """
    hints = typing.get_type_hints(Config)
    inner = {one.name: hints[one.name] for one in dataclasses.fields(Config)}
    found = [_group("", Config)]
    for key, owner in inner.items():
        if dataclasses.is_dataclass(owner):
            assert isinstance(owner, type)
            found.append(_group(key, owner))
        if key == "backend":
            found.append(_group("backend.overrides.PATTERN", OverrideConfig))
        if key == "algorithm":
            found += _algorithms(folders)
    return found


def _algorithms(folders: Iterable[Path]) -> list[Group]:
    """Returns the settings of each algorithm, from the dataclass that its YAML file names."""
    targets: dict[str, str] = {}
    for path in sorted(path for folder in folders for path in folder.glob("algorithm/*.yaml")):
        entries = _entries(path)
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if isinstance(entry, dict) and "target" in entry:
                targets[name] = entry["target"]
    owners = {name: resolve(target, f"algorithm.{name}.target") for name, target in targets.items()}
    # A target that is not an algorithm is rejected when it is chosen.
    return [
        _group(f"algorithm.{name}", owner)
        for name, owner in owners.items()
        if inspect.isclass(owner) and is_dataclass(owner)
    ]


def _entries(path: Path) -> Any:
    try:
        return yaml.safe_load(read_yaml(path))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError("--config-dir", path, reason=f"the file cannot be read ({error})") from error


def _group(key: str, owner: type) -> Group:
    return Group(key, inspect.getdoc(owner) or "", tuple(settings_of(owner)))


def options(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Returns the options of each group, as Hydra finds them: the files GROUP/OPTION.yaml in `folders`."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(found[group]) for group in sorted(found)}


def help_text(program: str, folders: Sequence[Path], notes: Sequence[str] = ()) -> str:
    """Returns the text that `--help` prints.

    Args:
        program: the name of the script.
        folders: folders with the options of groups.
        notes: additional paragraphs on this program.
    """
    lines = [f"{program} [FLAG ...] [GROUP=OPTION ...] [KEY=VALUE ...]", ""]
    for note in notes:
        lines += [*textwrap.wrap(note, _WIDTH), ""]
    lines += ["Flags", *(f"  {flag:<18}{meaning}" for flag, meaning in _FLAGS), ""]
    lines += ["Groups: GROUP=OPTION applies all settings of conf/GROUP/OPTION.yaml"]
    for group, names in options(folders).items():
        lines += textwrap.wrap(
            ", ".join(names), _WIDTH, initial_indent=f"  {group + ':':<13}", subsequent_indent=" " * 15
        )
    lines += [
        "",
        "Keys: KEY=VALUE, applied after the groups; listed as `TYPE = DEFAULT`, then the allowed values",
        f"`a path` is {Place().expected()}",
    ]
    for one in groups(folders):
        lines += [
            "",
            *textwrap.wrap((f"{one.key}: " if one.key else "") + " ".join(one.about.split()), _WIDTH),
        ]
        for setting in one.settings:
            allowed = f"  ({setting.allowed})" if setting.allowed else ""
            line = f"{one.full_key(setting)}: {setting.type} = {setting.default}{allowed}"
            lines += textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
            lines += textwrap.wrap(setting.doc, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def pages(conf: Path) -> dict[str, str]:
    """Returns the texts of docs/configuration.md and of the pages in docs/configuration/, by their paths in docs/."""
    parts: dict[str, list[Group]] = {}
    for one in groups([conf]):
        parts.setdefault(one.key.partition(".")[0], []).append(one)
    own = parts.pop("")
    below = {f"configuration/{key}.md": _page(key, found) for key, found in parts.items()}
    return {"configuration.md": _index(conf, own, parts), **below}


def _index(conf: Path, own: Sequence[Group], parts: Mapping[str, Sequence[Group]]) -> str:
    lines = ["# Configuration", ""]
    lines += [
        "Written by `uv run scripts/configuration.py` from the schema (`qatkit/config/schema/`); edit that instead.",
        "",
        "A run's configuration is the schema's defaults, then one option of each group (`conf/GROUP/OPTION.yaml`), then"
        " the recipe, then what is typed: `uv run train.py recipe=vit_qat backend=qnnpack schedule.lr=2e-5`. Null is"
        " typed `null` and means that nothing is set. `--cfg job` shows what a command line makes, and `--help` prints"
        f" all keys at once. In the tables, `a path` is {Place().expected()}.",
        "",
        "| keys | what they are |",
        "|---|---|",
    ]
    lines += [
        f"| [`{key}`](configuration/{key}.md) | {_cell(_first_line(key, found))} |"
        for key, found in parts.items()
    ]
    lines += ["", "## Options of groups", "", "| group | options |", "|---|---|"]
    lines += [
        f"| `{group}` | {', '.join(f'`{name}`' for name in names)} |"
        for group, names in options([conf]).items()
    ]
    for one in own:
        lines += ["", "## The run", "", one.about, "", *_table(one)]
    return "\n".join(lines) + "\n"


def _first_line(key: str, found: Sequence[Group]) -> str:
    """Returns the first sentence on a group; for algorithms, which have no schema group, their names."""
    about = " ".join(found[0].about.split())
    names = [one.key.removeprefix(f"{key}.") for one in found]
    return about.partition(". ")[0].rstrip(".") + "." if found[0].key == key else ", ".join(names)


def _page(key: str, found: Sequence[Group]) -> str:
    """Returns the page of all groups whose keys begin with `key`."""
    lines = [
        f"# `{key}`",
        "",
        "Written by `uv run scripts/configuration.py`; [all keys](../configuration.md).",
    ]
    for one in found:
        if one.key != key:
            lines += ["", f"## `{one.key}`"]
        lines += ["", one.about, "", *_table(one)]
    return "\n".join(lines) + "\n"


def _table(group: Group) -> list[str]:
    lines = ["| key | type | default | allowed | what it is |", "|---|---|---|---|---|"]
    for setting in group.settings:
        cells = [_code(group.full_key(setting)), _code(setting.type), _code(setting.default)]
        lines.append("| " + " | ".join([*cells, _cell(setting.allowed), _cell(setting.doc)]) + " |")
    return lines


def _code(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
