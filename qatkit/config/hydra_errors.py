"""The translation of errors of Hydra and OmegaConf to one line: the key, the value, and what is allowed.

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

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from qatkit.config.fields import type_name
from qatkit.config.schema import Config, OverrideConfig
from qatkit_verify.errors import ConfigError, did_you_mean

_BY_PATTERN = "backend.overrides"
_NOT_TYPED = "..."
_UNREADABLE = "[ ] { } ! ="  # in a key, by Hydra's grammar


def translate(error: Exception, overrides: Sequence[str], conf: Path) -> ConfigError:
    """Returns an error of Hydra or OmegaConf as a ConfigError, which names key and value."""
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals and re.fullmatch(r"\w+", key):
            return ConfigError("argument", key, f"KEY=VALUE{_recipe(key, conf)}")
        return ConfigError(key, value, _parseable(key, value))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, option = _missing(error.missing_cfg_file, overrides)
        options = error.options or [path.stem for path in (conf / group).glob("*.yaml")]
        if options:
            near = did_you_mean(option, options, 1)
            own = "; those of your own need --config-dir FOLDER" if group == "recipe" else ""
            return ConfigError(group, option, f"one of {', '.join(sorted(options))}{near}{own}")
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
        message = "expected one value (or -m before it, for a sweep over several)"
        if "/" in value:  # a path
            message = f"{message}; a path is typed {_in_quotes(key, value)}"
    return ConfigError(key, value, reason=message)


def _recipe(name: str, conf: Path) -> str:
    """Returns what was probably meant by a recipe's name without its key, else ""."""
    return f" (did you mean recipe={name}?)" if (conf / "recipe" / f"{name}.yaml").is_file() else ""


def _parseable(key: str, value: str) -> str:
    """Returns what to type in place of a value that Hydra can't read, as a shell takes it."""
    if proposed := _as_an_entry(key, value):
        return proposed
    keys_bare = re.sub(r"""(['"])([^'"]*)\1(?=\s*:)""", r"\2", value)
    if value.startswith("{") and keys_bare != value:
        return f"keys of a mapping without quotes: '{key}={keys_bare}'"
    if value.startswith(("{", "[")):
        what = "{KEY:VALUE,...}" if value.startswith("{") else "[VALUE,...]"
        return (
            f"{what} with its brackets closed; keys with one of {_UNREADABLE} only in a YAML file (a recipe)"
        )
    return f"KEY=VALUE, special characters {_in_quotes(key, value)}"


def _as_an_entry(key: str, value: str) -> str:
    """Returns how to type an entry of `backend.overrides` if `key` names one, else "".

    Patterns contain dots, which separate Hydra's keys, and characters that those can't have.
    """
    head, inside, rest = key.lstrip("+~").partition(f"{_BY_PATTERN}.")
    pattern, _, setting = (rest, "", "") if value.startswith("{") else rest.rpartition(".")
    if head or not inside or not pattern or setting not in {"", *vars(OverrideConfig())}:
        return ""
    if any(one in pattern for one in _UNREADABLE.split()):
        return f"a pattern without any of {_UNREADABLE}, which are read only in a YAML file (a recipe)"
    entry = f"{{{setting}:{value}}}" if setting else value
    return f"the whole entry, '+{_BY_PATTERN}={{{pattern}:{entry}}}'"


def _in_quotes(key: str, value: str) -> str:
    """Returns an override in quotes, as Hydra and a shell take it."""
    inner, outer = ('"', "'") if "'" in value else ("'", '"')
    return f"in quotes: {outer}{key}={inner}{value}{inner}{outer}"


def _message(error: Exception) -> str:
    """Returns the first line of the error message, or what was expected instead."""
    message = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, RecursionError):
        return "expected a value that is nested less deeply"
    if isinstance(error, OSError) and error.strerror:
        return f"expected a path that can be used ({error.strerror})"
    if isinstance(error, yaml.YAMLError):
        return f"expected a YAML file that can be read ({' '.join(str(error).split())})"
    if message.startswith("Cannot merge DictConfig"):
        return "expected {KEY:VALUE,...}"
    if not isinstance(error, HydraException | OmegaConfBaseException | ValueError):
        return f"expected another value: Hydra fails at it ({message})"
    return message


def _missing(file: str, overrides: Sequence[str]) -> tuple[str, str]:
    """Returns the group and option that `file` stands for, in the form in which they were typed, if they were."""
    for text in overrides:
        group, _, option = text.lstrip("+").partition("=")
        if f"{group}/{option}" == file:
            return group, option
    group, _, option = file.rpartition("/")
    return group, option


def _culprit(error: Exception, overrides: Sequence[str]) -> str:
    """Returns the override that causes the error: Hydra quotes it, or names its value, or fails alike with
    only that one.
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
    # Errors in Hydra's own settings show only when a run starts.
    return next((text for text in overrides if text.lstrip("+").startswith("hydra")), " ".join(overrides))


def _fails_alike(error: Exception, override: str) -> bool:
    if not GlobalHydra.instance().is_initialized():
        return False
    try:
        hydra.compose("config", overrides=[override])
    except Exception as alone:  # see compose_config
        alike = isinstance(error, RecursionError) or str(alone)[:80] == str(error)[:80]
        return type(alone) is type(error) and alike
    return False


def _translate_key(error: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError:
    """Returns the error at `full_key`: an unknown key, a value of another type, or one that cannot be resolved."""
    key = str(error.full_key)
    name, value = _as_typed(key, overrides)
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        if proposed := _as_an_entry(name, value):
            return ConfigError(name, value, proposed)
        if error.object_type is dict:
            return ConfigError(name, value, f"an existing entry (a new one is set with +{name}={value})")
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
    """Returns the key and value of the override that `key` comes from, or `key` itself if it comes from a file.

    For a typed key with a mistake in its first part, only that part is reported.
    """
    for text in reversed(overrides):
        name, _, value = text.lstrip("+~").partition("=")
        new_entry = value.startswith("{") and key.startswith(f"{name}.") and not text.startswith("+")
        if name == key or name.startswith(f"{key}.") or f".{key}." in f"{name}." or new_entry:
            return name, value
    return key, _NOT_TYPED


def _keys(error: OmegaConfBaseException, name: str) -> list[str]:
    """Returns the keys that may have been meant: the fields of the group that lacks the given one."""
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
    """Returns the annotation in the schema of the key, or of the list or dictionary that holds it."""
    if dataclasses.is_dataclass(error.object_type) and isinstance(error.object_type, type):
        hint: Any = typing.get_type_hints(error.object_type).get(str(error.key), Any)
    else:
        hint = error.ref_type
    if isinstance(error.key, int):  # an item of a list, in OmegaConf's own type names
        return str(hint).rpartition("[")[2].rstrip("]")
    return type_name(hint)
