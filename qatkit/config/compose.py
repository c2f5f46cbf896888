"""The boundary to Hydra and OmegaConf: turns YAML and overrides into a checked `Config` of plain dataclasses.

compose_config(conf, ["recipe=vit_qat", ...])    as the command line does it
save_config, load_config                         config.yaml in a run's folder
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import BooleanNode, DictConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from qatkit.config.hydra_errors import translate
from qatkit.config.overrides_file import with_overrides_file
from qatkit.config.paths import at_places, expand_home
from qatkit.config.quoting import calls_quoted, quoted
from qatkit.config.rules import DOTTED, validate
from qatkit.config.schema import Config
from qatkit.config.search_space import flat
from qatkit.config.sweep_file import own_folder
from qatkit.former_names import present_name, present_task
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import write_text
from qatkit_verify.untrusted import read_yaml

# Turns the composed configuration into another one: (composed, overrides) -> configuration.
Adapt = Callable[[DictConfig, Sequence[str]], DictConfig]


@functools.cache
def _schema() -> DictConfig:
    """Returns the shared schema as an OmegaConf node.

    Callers must not change it. It is shared because building it takes five times as long as copying it.
    """
    made = OmegaConf.structured(Config)
    assert isinstance(made, DictConfig)
    return made


def schema() -> DictConfig:
    """Returns the defaults of the schema, as a new node."""
    return copy.deepcopy(_schema())


def register() -> None:
    """Registers the dataclasses as Hydra's schema: `schema` in the defaults list of `conf/config.yaml`.

    A value of `${required:WHAT}` in YAML must be given on the command line. (OmegaConf's own `???` does not
    replace a default of the schema, so a recipe's `???` would silently become null.) `${own_folder:NAME}` is
    the folder of a sweep.
    """
    store = ConfigStore.instance()
    if "schema.yaml" not in store.repo:
        node = schema()
        OmegaConf.set_struct(node.algorithm, False)  # the settings of an algorithm are checked by its class
        OmegaConf.set_struct(node.search.space, False)  # and the keys of a space by the settings they name
        store.store(name="schema", node=node)
    OmegaConf.register_new_resolver("required", _required, replace=True)
    OmegaConf.register_new_resolver("own_folder", own_folder, replace=True, use_cache=True)


def _required(*what: str) -> None:
    raise LookupError(f"the key is required; set it to {', '.join(what)}")


def compose_config(
    conf: Path, overrides: Sequence[str] = (), adapt: Adapt | None = None, folders: Sequence[str] = ()
) -> Config:
    """Returns the checked configuration that `overrides` ("key=value") make from `conf/config.yaml`.

    Args:
        adapt: a function that changes the composed configuration before it is checked
            (`export_command.export_run`).
        folders: the user's configuration folders; they are searched like `conf`, before those of
            hydra.searchpath.

    Raises:
        ConfigError: a key or option is unknown; a value is missing, out of range or of a wrong type; two values
            exclude each other; or the file of backend.overrides_file cannot be read.
    """
    overrides = calls_quoted(overrides)
    with _composed(conf, overrides, folders) as node:
        _check_booleans(overrides)
        try:
            return to_config(node if adapt is None else adapt(node, overrides))
        except (OmegaConfBaseException, RecursionError) as error:
            raise translate(error, overrides, conf) from error


@contextmanager
def without_hydra_around() -> Iterator[None]:
    """Hides Hydra's global state in the context, so that a program that Hydra has started can use Hydra itself."""
    around = GlobalHydra.instance()
    job, around.hydra = around.hydra, None
    try:
        yield
    finally:
        around.hydra = job


def launcher_of(conf: Path, overrides: Sequence[str], folders: Sequence[str] = ()) -> str:
    """Returns the dotted path of the class that starts the runs of a sweep.

    Raises:
        ConfigError: the configuration is wrong, as in `compose_config`.
    """
    with _composed(conf, overrides, folders, hydras=True) as node:
        return str(node.hydra.launcher.get("_target_"))


@contextmanager
def _composed(
    conf: Path, overrides: Sequence[str], folders: Sequence[str], *, hydras: bool = False
) -> Iterator[DictConfig]:
    """Yields the composed node, within Hydra's configuration context; `hydras` adds Hydra's own node."""
    register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf.resolve())):
        try:
            every = _searching(overrides, folders)
            node = hydra.compose("config", overrides=every, return_hydra_config=hydras)
        except Exception as error:  # Hydra and YAML may raise any error, and no other code runs here
            raise translate(error, overrides, conf) from error
        yield node


def _searching(overrides: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Returns the overrides with one hydra.searchpath for `folders` and the typed paths.

    Hydra reads only the first override of hydra.searchpath.
    """
    typed = [one for one in overrides if one.lstrip("+").startswith("hydra.searchpath=")]
    found = [f"file://{Path(folder).resolve()}" for folder in folders]
    for text in typed if found else ():
        found += OverridesParser.create().parse_override(text).value()  # type: ignore[arg-type]  # a list, or Hydra says so
    rest = [one for one in overrides if one not in typed]
    return [*rest, f"hydra.searchpath=[{','.join(map(quoted, found))}]"] if found else list(overrides)


def _check_booleans(overrides: Sequence[str]) -> None:
    """Rejects numbers other than 0 and 1 for booleans; OmegaConf would treat them as true.

    Raises:
        ConfigError: a value, or an entry of a mapping, is such a number.
    """
    parser = OverridesParser.create()
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if re.match(r"[{\d.-]", value):  # a mapping or a number
            _check_boolean(key, parser.parse_override(text).value(), _node(key))


def _check_boolean(key: str, value: Any, node: Any) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            _check_boolean(f"{key}.{name}" if key else name, one, _child(node, name))
    elif isinstance(node, BooleanNode) and type(value) in (int, float) and str(value) not in ("0", "1"):
        raise ConfigError(key, value, "true, false or null" if node._is_optional() else "true or false")


def check_texts(overrides: Sequence[str]) -> None:
    """Rejects unquoted values of text settings that Hydra would read as numbers and change (1.10 to 1.1).

    Raises:
        ConfigError: a value would change; the message shows it in the quotes that preserve it.
    """
    parser = OverridesParser.create()
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        if not isinstance(_node(key), StringNode):
            continue
        try:
            read = parser.parse_override(text).value()
        except HydraException:  # the composition reports it
            continue
        if isinstance(read, int | float) and str(read) != value:
            raise ConfigError(
                key,
                value,
                f"quotes around the text, {key}=\"'{value}'\"; without quotes, the value is {read}",
            )


def _node(key: str) -> Any:
    """Returns the OmegaConf node of a key in the schema, which has the key's type; None for an unknown key."""
    return functools.reduce(_child, key.split("."), _schema())


def _child(node: Any, name: str) -> Any:
    """Returns the node of a key in a group of the schema; an entry of a mapping has the mapping's type of entries."""
    if not isinstance(node, DictConfig):
        return None
    kind = node._metadata.element_type
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _entry(kind)
    return node._get_node(name, validate_access=False)


@functools.cache
def _entry(kind: Any) -> DictConfig:
    made = OmegaConf.structured(kind)
    assert isinstance(made, DictConfig)
    return made


def to_config(node: DictConfig) -> Config:
    """Returns the plain dataclasses of a composed configuration, with every value checked.

    The values are merged into the schema again: Hydra's `+key=value` adds keys that the schema lacks, which
    would otherwise be dropped silently.

    Raises:
        ConfigError: a value is out of range or a number in place of a boolean, two values exclude each other, or the
            file of backend.overrides_file cannot be read.
        OmegaConfBaseException: a required value is missing, or a key or type does not fit the schema.
    """
    values = with_overrides_file(OmegaConf.to_container(node, resolve=True))
    _check_boolean("", values, _schema())
    config = OmegaConf.to_object(OmegaConf.merge(_schema(), values))
    assert isinstance(config, Config)
    expand_home(config)
    _use_present_names(config)
    config.search.space = flat(config.search.space)
    with at_places(config):
        validate(config)
    return config


def _use_present_names(config: Config) -> None:
    """Replaces earlier names of modules and tasks by the present ones.

    Runs of earlier versions can thus be resumed, and their settings compare as equal to present ones.
    """
    for group, leaf in (key.split(".") for key in DOTTED):
        holder = getattr(config, group)
        setattr(holder, leaf, present_name(getattr(holder, leaf)))
    config.task = present_task(config.task)
    config.verify.checks = [present_name(path) for path in config.verify.checks]
    for entry in config.algorithm.values():
        if isinstance(entry, dict) and isinstance(entry.get("target"), str):
            entry["target"] = present_name(entry["target"])


def save_config(config: Config, path: Path, without: Collection[str] = ()) -> None:
    """Writes `config` as YAML in an atomic step, except for the groups in `without`, which the run does not use."""
    values = {key: value for key, value in OmegaConf.structured(config).items() if key not in without}
    write_text(path, OmegaConf.to_yaml(OmegaConf.create(values)))


def load_config(path: Path) -> Config:
    """Reads a file that `save_config` wrote, and checks it against the schema and with `validate`.

    Raises:
        ConfigError: the file cannot be read, is not YAML or does not fit the schema, or a value is not allowed.
    """
    allowed = "a config.yaml written by train.py"
    try:
        node = OmegaConf.load(io.StringIO(read_yaml(path)))
        if not isinstance(node, DictConfig) or not node:
            raise ConfigError("config", path, allowed)
        _translate_algorithm(node)
        return to_config(node)
    except ConfigError as error:
        if error.key == "config":
            raise
        raise ConfigError(error.key, error.value, reason=f"{error.problem} (in {path})") from error
    except (OSError, ValueError, TypeError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError("config", path, f"{allowed} ({error})") from error


def _translate_algorithm(node: DictConfig) -> None:
    """Translates the former fixed keys of `algorithm` (equalize, relu6, bias_correction, bias_images).

    The result has the present form, a mapping from names to algorithms.
    """
    old = node.get("algorithm")
    if not isinstance(old, DictConfig) or not isinstance(old.get("equalize"), bool):
        return
    chosen: dict[str, dict[str, Any]] = {}
    if old.equalize:
        chosen["equalize"] = {"target": "qatkit.algorithms.Equalize", "relu6": old.get("relu6", "keep")}
    method = old.get("bias_correction", "none")
    if method != "none":
        images = old.get("bias_images", 128)
        target = "qatkit.algorithms.BiasCorrection"
        chosen["bias_correction"] = {"target": target, "method": method, "images": images}
    node.algorithm = chosen
