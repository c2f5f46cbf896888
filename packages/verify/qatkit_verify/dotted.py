"""Resolves dotted paths, which the configuration uses to name components of the library or of the user's code."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qatkit_verify.errors import ConfigError, did_you_mean
from qatkit_verify.foreign import OURS, calling


def resolve(path: str, key: str) -> Any:
    """Returns the object at a dotted path, `package.module.name`.

    Raises:
        ConfigError: `path` (the value of `key`) is not a dotted path, or its module cannot be imported, raises an
            exception, or lacks the name; the message lists near names.
    """
    module_path, name = _parts(path, key)
    with calling(key, path):
        try:
            module = importlib.import_module(module_path)
        except ModuleNotFoundError as error:
            if not f"{module_path}.".startswith(f"{error.name}."):  # a module that it imports is missing
                raise
            reason = f"a dotted path that can be imported ({error}; is its folder on PYTHONPATH?)"
            raise ConfigError(key, path, reason) from error
    if not hasattr(module, name):
        raise _unknown(path, key, vars(module))
    return getattr(module, name)


def dotted_path(name: str, known: Mapping[str, str], key: str, kind: str) -> str:
    """Returns the dotted path of a component, given its short name or its path.

    Args:
        name: the value of `key`.
        known: the dotted paths by short name.
        key: the key of the configuration, for the message.
        kind: the kind of component, for the message ("Runtime").

    Raises:
        ConfigError: `name` is neither a short name nor a dotted path.
    """
    path = known.get(name, name)
    if "." not in path:
        expected = f"one of {', '.join(known)}, or the dotted path of a {kind}"
        raise ConfigError(key, name, expected + did_you_mean(name, known, n=1))
    return path


def check_path(path: str, key: str) -> None:
    """Checks that `resolve` would find the object at `path`.

    Our own modules, many of which import torch, are parsed instead of imported if their source tells all names.

    Raises:
        ConfigError: see `resolve`.
    """
    module_path, name = _parts(path, key)
    names = None if module_path in sys.modules else _names_in_source(module_path)
    if names is None:
        resolve(path, key)
    elif name not in names:
        raise _unknown(path, key, names)


def _parts(path: str, key: str) -> tuple[str, str]:
    """Returns the module and the name of a dotted path; raises ConfigError for other texts."""
    module_path, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in (*module_path.split("."), name)):
        raise ConfigError(key, path, "a dotted path, such as my_package.my_module.name")
    return module_path, name


def _unknown(path: str, key: str, names: Iterable[str]) -> ConfigError:
    module_path, _, name = path.rpartition(".")
    public = [word for word in names if not word.startswith("_")]
    return ConfigError(key, path, f"a name in {module_path}{did_you_mean(name, public)}")


def _names_in_source(module_path: str) -> set[str] | None:
    """Returns the names in one of our modules, including submodules.

    It is None if only an import can tell the names, as for every module of others.
    """
    package, *inner = module_path.split(".")
    if package not in OURS:
        return None
    (root,) = importlib.import_module(package).__path__
    folder = Path(root, *inner)
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not file.is_file():
        return None
    names = set(_bound(ast.parse(file.read_bytes()).body))
    if names & {"*", "__getattr__"}:
        return None
    return names | {one.name for one in pkgutil.iter_modules([str(folder)])}


def _bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yields the names that the statements of a module bind; "*" if only running it tells all of them."""
    for statement in body:
        match statement:
            case ast.Import(names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.FunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.Assign(targets):
                yield from (
                    one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)
                )
            case ast.AnnAssign(ast.Name(name), value=ast.expr()):
                yield name
            case ast.Expr() | ast.If(ast.Name("TYPE_CHECKING"), orelse=[]):
                pass
            case _:
                yield "*"
