"""Dotted paths: how the configuration names a component of the library's, or of the user's own."""

from __future__ import annotations

import importlib
from typing import Any

from qatkit_verify.errors import ConfigError, near_matches
from qatkit_verify.foreign import calling


def resolve(path: str, key: str) -> Any:
    """The object at a dotted path, `package.module.name`.

    Raises:
        ConfigError: `path` (the value of `key`) is no dotted path, its module cannot be imported or raises
            something, or has no such name; the message lists near names.
    """
    module_path, _, name = path.rpartition(".")
    if not all(part.isidentifier() for part in (*module_path.split("."), name)):
        raise ConfigError(key, path, "a dotted path, such as my_package.my_module.name")
    with calling(key, path):
        try:
            module = importlib.import_module(module_path)
        except ModuleNotFoundError as error:
            if not f"{module_path}.".startswith(f"{error.name}."):  # it was found, and wants another one
                raise
            reason = f"a dotted path that can be imported ({error}; is its folder on PYTHONPATH?)"
            raise ConfigError(key, path, reason) from error
    if not hasattr(module, name):
        public = [word for word in vars(module) if not word.startswith("_")]
        raise ConfigError(key, path, f"a name in {module_path}, such as {near_matches(name, public)}")
    return getattr(module, name)
