"""The types of settings: checks values against a field's annotation, and describes fields for users."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qatkit.config.fields import DOC, LIMIT, field_limit, field_of, may_be_null
from qatkit_verify.errors import ConfigError, as_typed


def checked(owner: type, name: str, key: str, value: Any) -> Any:
    """Checks `value` against the field `name` of a dataclass; returns it, converted to float for a float field.

    Args:
        owner: the dataclass.
        name: the name of the field.
        key: the key that messages name.
        value: the value, as it is read from YAML.

    Raises:
        ConfigError: the value has another type, or the field's limit does not allow it.
    """
    hint = typing.get_type_hints(owner)[name]
    if not _fits(value, hint):
        raise ConfigError(key, value, f"a value of type {type_name(hint)}")
    limit = field_limit(field_of(owner, name))
    if limit is not None and value is not None:
        limit.check(key, value, or_null=may_be_null(field_of(owner, name)))
    return float(value) if hint is float else value


def hint_of(owner: type, key: str) -> Any:
    """Returns the annotation of the field with a dotted key; Any if none is declared (entries of a mapping)."""
    name, _, rest = key.partition(".")
    hint = typing.get_type_hints(owner).get(name, Any)
    if not rest:
        return hint
    return hint_of(hint, rest) if dataclasses.is_dataclass(hint) and isinstance(hint, type) else Any


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value from YAML fits an annotation; the contents of lists and mappings are not checked."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    kind = typing.get_origin(hint) or hint
    if kind is Any or isinstance(value, bool):
        return kind in (Any, bool)
    return isinstance(value, (int, float) if kind is float else kind)


@dataclass(frozen=True)
class Setting:
    """The description of a field for users.

    Attributes:
        name: the name of the field.
        type: its type as it is written in the schema.
        default: its default as it is typed.
        allowed: the allowed values in short form; "" if the type is the only limit.
        doc: the meaning of the field, with its unit.
    """

    name: str
    type: str
    default: str
    allowed: str
    doc: str


def settings_of(owner: type) -> list[Setting]:
    """Returns the settings of a dataclass in order, without its fields that are dataclasses."""
    hints = typing.get_type_hints(owner)
    return [
        Setting(
            one.name,
            type_name(hints[one.name]),
            as_typed(_default(one)),
            "" if one.metadata[LIMIT] is None else str(one.metadata[LIMIT]),
            one.metadata[DOC],
        )
        for one in dataclasses.fields(owner)
        if DOC in one.metadata
    ]


def _default(one: dataclasses.Field[Any]) -> Any:
    factory: Callable[[], Any] | Any = one.default_factory
    return one.default if factory is dataclasses.MISSING else factory()


def type_name(hint: Any) -> str:
    """Returns a type as it is written in the schema."""
    if isinstance(hint, types.UnionType):
        return " | ".join(type_name(one) for one in typing.get_args(hint))
    if hint is type(None):
        return "None"
    plain = isinstance(hint, type) and not typing.get_args(hint)
    return hint.__name__ if plain else re.sub(r"\b(?:\w+\.)+", "", str(hint))  # the name without its module
