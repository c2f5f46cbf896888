"""Errors in the words of the command line: `trainer=gpu` was typed, not the `trainer.accelerator` that it sets.

An option of a group is a file with many keys, and `onnx=FILE` sets the name of the model. If such a key is refused,
or a refusal names it as a condition, the error also says what was typed for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qatkit_verify.errors import ConfigError, as_typed
from qatkit_verify.untrusted import read_yaml

_RECIPE, _GLOBAL = "recipe", "# @package _global_"
# The key that a short one sets, and the prefix of its value.
_SHORT = {"onnx": ("model.name", "onnx/")}
_SETTING = re.compile(r"(?<![\w.])([a-z_]+(?:\.\w+)+)=([^\s,;)]+)")  # a key with its value in a message
_NOT_SET = object()


@contextmanager
def named_as_typed(conf: Path, overrides: Sequence[str], folders: Sequence[str] = ()) -> Iterator[None]:
    """Raises a ConfigError of the context as `error_as_typed` returns it; arguments as there."""
    try:
        yield
    except ConfigError as error:
        told = error_as_typed(error, conf, overrides, folders)
        if told is error:
            raise
        raise told from error


def error_as_typed(
    error: ConfigError, conf: Path, overrides: Sequence[str], folders: Sequence[str] = ()
) -> ConfigError:
    """Returns the error with the override that set its key, or the error itself if the key was typed.

    Args:
        error: an error of the job.
        conf: the folder with the groups.
        overrides: the typed overrides of the job.
        folders: the user's configuration folders.
    """
    try:
        return _Typed.of(overrides, [*map(Path, folders), conf]).told(error)
    except (OSError, ValueError, yaml.YAMLError):  # another error reports an option that cannot be read
        return error


@dataclass(frozen=True)
class _Typed:
    """The typed overrides: options of groups, the recipe first, and the values of keys."""

    folders: Sequence[Path]
    options: Sequence[tuple[str, str]]
    keys: Mapping[str, str]

    @classmethod
    def of(cls, overrides: Sequence[str], folders: Sequence[Path]) -> _Typed:
        pairs = [text.lstrip("+~").partition("=")[::2] for text in overrides]
        groups = {key for key, _ in pairs if any((folder / key).is_dir() for folder in folders)}
        options = [
            (key, one) for key, value in pairs if key in groups for one in value.strip("[]").split(",")
        ]
        options.sort(key=lambda one: one[0] != _RECIPE)  # its own values replace those of other options
        return cls(folders, options, {key: value for key, value in pairs if key not in groups})

    def told(self, error: ConfigError) -> ConfigError:
        """Returns the error with what was typed, or the error itself if it names that already."""
        problem, sets = self._short(error.problem), self._conditions(error.problem)
        key, value = error.key, error.value
        short = next((one for one, (long, _) in _SHORT.items() if long == key and one in self.keys), None)
        option = self._option(key, value)
        if short is not None and key not in self.keys:
            key, value = short, self.keys[short]
        elif option is not None and option[0] == _RECIPE:
            sets.setdefault(option, []).insert(0, f"{key}={as_typed(value)}")
        elif option is not None:
            problem = f"the option sets {key}={as_typed(value)}; {problem}"
            key, value = option
        told = "".join(f"; {'='.join(one)} sets {' and '.join(settings)}" for one, settings in sets.items())
        if (key, problem + told) == (error.key, error.problem):
            return error
        return ConfigError(key, value, reason=problem + told)

    def _short(self, problem: str) -> str:
        """Returns the message with short keys in place of those that they set."""
        for short, (key, prefix) in _SHORT.items():
            if short in self.keys:
                value = self.keys[short].strip("'\"")
                problem = problem.replace(f"{key}={prefix}{value}", f"{short}={value}")
        return problem

    def _conditions(self, problem: str) -> dict[tuple[str, str], list[str]]:
        """Returns the keys that a message names as conditions, by the option that sets them."""
        found = dict[tuple[str, str], list[str]]()
        for setting in _SETTING.finditer(problem):
            if (option := self._option(setting[1], setting[2])) is not None:
                found.setdefault(option, []).append(setting[0])
        return found

    def _option(self, key: str, value: object) -> tuple[str, str] | None:
        """Returns the typed option that sets the key to this value; None if the key itself was typed, or by default."""
        if any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.") for one in self.keys):
            return None
        for group, option in self.options:
            if any(_alike(_found(one, key), value) for one in self._settings(group, option)):
                return group, option
        return None

    def _settings(self, group: str, option: str) -> Iterator[Any]:
        """Yields the settings of an option's file, and then of the files that it names as its defaults."""
        path = next(
            (one for folder in self.folders if (one := folder / group / f"{option}.yaml").is_file()), None
        )
        if path is None:
            return
        text = read_yaml(path)
        read = yaml.safe_load(text)
        settings = dict(read) if isinstance(read, Mapping) else {}
        defaults = settings.pop("defaults", [])
        yield settings if text.startswith(_GLOBAL) else {group: settings}
        for entry in defaults:
            named = entry if isinstance(entry, Mapping) else {group: entry}
            for name, chosen in named.items():
                if chosen != "_self_":
                    yield from self._settings(str(name).removeprefix("override ").lstrip("/"), str(chosen))


def _found(settings: Any, key: str) -> Any:
    """Returns the value of a dotted key; names in mappings may contain dots too."""
    if not isinstance(settings, Mapping):
        return _NOT_SET
    if key in settings:
        return settings[key]
    inner = [name for name in settings if key.startswith(f"{name}.")]
    return _found(settings[inner[0]], key.removeprefix(f"{inner[0]}.")) if inner else _NOT_SET


def _alike(found: Any, value: object) -> bool:
    """Returns whether a value of a file is that of the configuration, which may be a number where YAML reads a text."""
    if found is _NOT_SET:
        return False
    texts = as_typed(found), as_typed(value)
    try:
        return texts[0] == texts[1] or float(texts[0]) == float(texts[1])
    except ValueError:
        return False
