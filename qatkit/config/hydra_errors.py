"""What Hydra and OmegaConf raise, translated to one line: the key, the value, and what is allowed.

Their messages span several lines and speak of structs, full keys and search paths. What a user needs is in
the exceptions: the option that was not found and those that exist, the full key of a value, and the dataclass
of the schema that lacks a key or has another type for it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from qatkit.config.fields import type_name
from qatkit.config.schema import Config
from qatkit.errors import ConfigError, near_matches


def translate(error: Exception, overrides: Sequence[str], conf: Path) -> ConfigError:
    """What Hydra or OmegaConf said, as key, value and what is allowed."""
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return ConfigError(key, value, f"KEY=VALUE, special characters in quotes: \"{key}='{value}'\"")
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        options = error.options or [path.stem for path in (conf / group).glob("*.yaml")]
        return ConfigError(group, option, f"one of {', '.join(sorted(options))}{_nearest(option, options)}")
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            found = _translate_key(cause, overrides)
            file = re.match(r"In '(.+?)': ", str(error))
            return (
                ConfigError(found.key, found.value, f"{found.allowed} (in {file[1]}.yaml)") if file else found
            )
    message = str(error).strip().split("\n")[0]
    # Hydra quotes the override that is at fault, where it is one.
    culprit = next((text for text in overrides if f"'{text}'" in message), " ".join(overrides))
    key, _, value = culprit.partition("=")
    if message.startswith("Ambiguous value") or "requires --multirun" in message:
        message = "one value; with -m before it, a sweep over several"
    return ConfigError(key, value, message)


def _translate_key(error: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError:
    """An error at `full_key`: no such key, a value of another type, or one that cannot be resolved."""
    key = str(error.full_key)
    name, value = _as_typed(key, overrides)
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        if error.object_type is dict:
            return ConfigError(name, value, f"an entry that exists; a new one is set with +{name}={value}")
        return ConfigError(name, value, f"no such key; near it: {near_matches(name, _keys(error, name))}")
    if isinstance(error, ValidationError):
        head, inside, tail = name.partition(f".{key}.")
        if inside:  # an entry of a new key, set part by part
            return ConfigError(name, value, f"to be set as a whole, +{head}={{{key}:{{{tail}:{value}}}}}")
        return ConfigError(key, error.value, f"a value of type {_type_name(error)}")
    reason = str(error).split("\n")[0].rpartition("raised while resolving interpolation: ")[2]
    return ConfigError(key, value, reason)


def _as_typed(key: str, overrides: Sequence[str]) -> tuple[str, str]:
    """The key and value of the override that `key` comes from, or `key` itself when a file has it.

    A typed key with a mistake in its first part is reported as that part alone.
    """
    for text in reversed(overrides):
        name, _, value = text.lstrip("+~").partition("=")
        new_entry = value.startswith("{") and key.startswith(f"{name}.") and not text.startswith("+")
        if name == key or name.startswith(f"{key}.") or f".{key}." in name or new_entry:
            return name, value
    return key, "..."


def _keys(error: OmegaConfBaseException, name: str) -> list[str]:
    """The keys that may have been meant: the fields of the group that lacks the one given."""
    group = error.object_type
    if not dataclasses.is_dataclass(group):
        return [field.name for field in dataclasses.fields(Config)]
    prefix = str(error.full_key).removesuffix(str(error.key))
    keys = [prefix + field.name for field in dataclasses.fields(group)]
    if group is not Config:
        return keys
    hints = typing.get_type_hints(Config)
    nested = [
        f"{key}.{field.name}"
        for key in keys
        if dataclasses.is_dataclass(hints[key])
        for field in dataclasses.fields(hints[key])
    ]
    return nested if "." in name else [*keys, "recipe"]


def _type_name(error: OmegaConfBaseException) -> str:
    """The annotation in the schema of the key, or of the list or dictionary that it stands in."""
    if dataclasses.is_dataclass(error.object_type) and isinstance(error.object_type, type):
        hint: Any = typing.get_type_hints(error.object_type).get(str(error.key), Any)
    else:
        hint = error.ref_type
    return type_name(hint)


def _nearest(word: str, options: Sequence[str]) -> str:
    near = near_matches(word, options, n=1)
    return f" (did you mean {near}?)" if near else ""
