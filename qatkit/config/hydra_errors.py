"""Translates errors of Hydra and OmegaConf to one line: the key, the value, and what is allowed.

The original messages span several lines and mention structs, full keys and search paths. The exceptions
contain what a user needs: the unknown option and the existing ones, the full key of a value, and the
dataclass of the schema that lacks a key or declares another type for it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from qatkit.config.field_types import type_name
from qatkit.config.schema import Config, OverrideConfig
from qatkit_verify.errors import ConfigError, did_you_mean

_BY_PATTERN = "backend.overrides"
_NOT_TYPED = "..."
_NAMED = 30  # maximum number of options that a message lists
_UNREADABLE = "[ ] { } ! ="  # not allowed in a key by Hydra's grammar


def translate(error: Exception, overrides: Sequence[str], conf: Path) -> ConfigError:
    """Returns an error of Hydra or OmegaConf as a ConfigError that names key and value."""
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals and re.fullmatch(r"\w+", key):
            return ConfigError("argument", key, f"KEY=VALUE{_recipe(key, conf)}")
        return ConfigError(key, value, _parseable(key, value))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, option = _missing(error.missing_cfg_file, overrides)
        options = error.options or [path.stem for path in (conf / group).glob("*.yaml")]
        if options:
            named = len(options) <= _NAMED
            near = did_you_mean(option, options, 1 if named else 3)
            every = ", ".join(sorted(options)) if named else f"the {len(options)} names that --help lists"
            own = "; your own recipes need --config-dir FOLDER" if group == "recipe" else ""
            return ConfigError(group, option, f"one of {every}{near}{own}")
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, OmegaConfBaseException) and cause.full_key and cause.full_key != "_dummy_":
            found = _translate_key(cause, overrides)
            file = re.match(r"In '(.+?)': ", str(error))
            return (
                ConfigError(found.key, found.value, reason=f"{found.problem} (in {file[1]}.yaml)")
                if file
                else found
            )
    message = _message(error)
    key, _, value = _culprit(error, overrides).partition("=")
    if message.startswith("Ambiguous value") or "requires --multirun" in message:
        message = "expected one value, or the flag -m in front for a sweep over several"
        if "/" in value:  # the name is a path
            message = f"{message}; type a path {_in_quotes(key, value)}"
    return ConfigError(key, value, reason=message)


def _recipe(name: str, conf: Path) -> str:
    """Returns the suggestion recipe=NAME if `name`, which was typed without a key, is a recipe; else ""."""
    return f" (did you mean recipe={name}?)" if (conf / "recipe" / f"{name}.yaml").is_file() else ""


def _parseable(key: str, value: str) -> str:
    """Returns what to type, quoted for a shell, in place of a value that Hydra can't read."""
    if proposed := _as_an_entry(key, value):
        return proposed
    keys_bare = re.sub(r"""(['"])([^'"]*)\1(?=\s*:)""", r"\2", value)
    if value.startswith("{") and keys_bare != value:
        return f"keys of a mapping without quotes: '{key}={keys_bare}'"
    if value.startswith(("{", "[")):
        what = "{KEY:VALUE,...}" if value.startswith("{") else "[VALUE,...]"
        return (
            f"{what} with closed brackets; keys with any of {_UNREADABLE} only work in a YAML file (a recipe)"
        )
    return f"KEY=VALUE, with special characters {_in_quotes(key, value)}"


def _as_an_entry(key: str, value: str) -> str:
    """Returns how to type an entry of `backend.overrides` if `key` names one, else "".

    Patterns contain dots, which separate Hydra's keys, and characters that Hydra's keys cannot contain.
    """
    head, inside, rest = key.lstrip("+~").partition(f"{_BY_PATTERN}.")
    pattern, _, setting = (rest, "", "") if value.startswith("{") else rest.rpartition(".")
    if head or not inside or not pattern or setting not in {"", *vars(OverrideConfig())}:
        return ""
    if any(one in pattern for one in _UNREADABLE.split()):
        return f"a pattern without any of {_UNREADABLE}, which only work in a YAML file (a recipe)"
    entry = f"{{{setting}:{value}}}" if setting else value
    return f"the whole entry, '+{_BY_PATTERN}={{{pattern}:{entry}}}'"


def _in_quotes(key: str, value: str) -> str:
    """Returns an override, quoted for Hydra and a shell."""
    inner, outer = ('"', "'") if "'" in value else ("'", '"')
    return f"in quotes: {outer}{key}={inner}{value}{inner}{outer}"


def _message(error: Exception) -> str:
    """Returns the first line of the error's message, or for some errors a description that is easier to read."""
    message = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, RecursionError):
        return "expected a value that is nested less deeply"
    if isinstance(error, OSError) and error.strerror:
        return f"the path cannot be used ({error.strerror})"
    if isinstance(error, yaml.YAMLError):
        return f"the YAML file cannot be read ({' '.join(str(error).split())})"
    if message.startswith("Cannot merge DictConfig"):
        return "expected {KEY:VALUE,...}"
    if not isinstance(error, HydraException | OmegaConfBaseException | ValueError):
        return f"Hydra cannot read this value ({message})"
    return message


def _missing(file: str, overrides: Sequence[str]) -> tuple[str, str]:
    """Returns the group and the option of a missing YAML file, which the message calls GROUP/OPTION.

    Both may contain slashes. The override that names the file shows where to split; if there is none, the last
    slash separates them.
    """
    for text in overrides:
        group, _, option = text.lstrip("+").partition("=")
        if f"{group}/{option}" == file:
            return group, option
    group, _, option = file.rpartition("/")
    return group, option


def _culprit(error: Exception, overrides: Sequence[str]) -> str:
    """Returns the override that causes the error, or all overrides if none can be found.

    These are tried in order:

    1. the first override that the message quotes
    2. the first whose value the message quotes
    3. the first with which alone Hydra fails in the same way
    4. the last whose key is in the message
    5. the first of Hydra's own settings
    """
    message = str(error)
    for text in overrides:
        if f"'{text}'" in message:
            return text
    for text in overrides:
        value = text.partition("=")[2].strip("'\"")
        if value and f"'{value}'" in message:
            return text
    for text in overrides:
        if _fails_alike(error, text):
            return text
    for text in reversed(overrides):
        key = text.lstrip("+~").partition("=")[0]
        if re.search(rf"(^|\W){re.escape(key)}(\W|$)", message):
            return text
    # Errors in Hydra's own settings occur only when a run starts.
    return next((text for text in overrides if text.lstrip("+").startswith("hydra")), " ".join(overrides))


def _fails_alike(error: Exception, override: str) -> bool:
    if not GlobalHydra.instance().is_initialized():
        return False
    try:
        hydra.compose("config", overrides=[override])
    except Exception as alone:  # any error may occur, as in compose_config
        alike = isinstance(error, RecursionError) or str(alone)[:80] == str(error)[:80]
        return type(alone) is type(error) and alike
    return False


def _translate_key(error: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError:
    """Returns the error at `full_key`: the key is unknown, or the value has a wrong type or cannot be resolved."""
    key = str(error.full_key)
    name, value = _as_typed(key, overrides)
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        if proposed := _as_an_entry(name, value):
            return ConfigError(name, value, proposed)
        if error.object_type is dict:
            return ConfigError(name, value, f"an existing entry (+{name}={value} adds a new one)")
        near = did_you_mean(name, _keys(error, name))
        return ConfigError(name, value, reason=f"the key does not exist{near}")
    if isinstance(error, ValidationError):
        if value != _NOT_TYPED and (proposed := _as_an_entry(name, value)):
            return ConfigError(name, value, proposed)
        kind = _type_name(error)
        listed = (
            f" ('{key}=[{error.value}]')" if kind.startswith("list[") and "[" not in str(error.value) else ""
        )
        return ConfigError(key, error.value, f"a value of type {kind}{listed}")
    reason = str(error).split("\n")[0].rpartition("raised while resolving interpolation: ")[2]
    return ConfigError(key, value, reason=reason)


def _as_typed(key: str, overrides: Sequence[str]) -> tuple[str, str]:
    """Returns the key and value of the override that sets `key`; `key` and "..." if a file sets it.

    `key` may be only the first part of a typed key: if that part is wrong, the error names no more.
    """
    for text in reversed(overrides):
        name, _, value = text.lstrip("+~").partition("=")
        new_entry = value.startswith("{") and key.startswith(f"{name}.") and not text.startswith("+")
        if name == key or name.startswith(f"{key}.") or f".{key}." in f"{name}." or new_entry:
            return name, value
    return key, _NOT_TYPED


def _keys(error: OmegaConfBaseException, name: str) -> list[str]:
    """Returns the keys that may have been meant: the fields of the group in which the key was not found."""
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
    """Returns the type of the key in the schema; for an entry of a list or mapping, the type of its entries."""
    if dataclasses.is_dataclass(error.object_type) and isinstance(error.object_type, type):
        hint: Any = typing.get_type_hints(error.object_type).get(str(error.key), Any)
    else:
        hint = error.ref_type
    if isinstance(error.key, int):  # OmegaConf's own type names for an item of a list
        return str(hint).rpartition("[")[2].rstrip("]")
    return type_name(hint)
