"""Parses what was typed on the command line: the flags, and the overrides of each job of a sweep."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep

from qatkit.cli.hydra_flags import flags_parser
from qatkit.config.hydra_errors import translate
from qatkit_verify.errors import ConfigError, did_you_mean, first_line
from qatkit_verify.untrusted import read_yaml

LARGEST_AXIS = 10_000  # maximum number of values of one key of a sweep
COMPOSED_AHEAD = 64  # number of jobs of a sweep that are checked before the first one starts, at 0.05 s each


def typed_arguments() -> argparse.Namespace:
    """Returns the flags and overrides as Hydra parses them.

    Raises:
        ConfigError: a flag is unknown, unsupported, lacks its argument, or excludes another one, or a file in
            the folder of --config-dir cannot be read.
    """
    parser = flags_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # argparse prints its usage over many lines
    arguments, unknown = parser.parse_known_args()
    if unknown:
        flags = [one for action in parser._actions for one in action.option_strings]
        near = did_you_mean(unknown[0].partition("=")[0], flags, n=1) if unknown[0].startswith("-") else ""
        raise ConfigError("argument", unknown[0], f"KEY=VALUE, after all flags such as -m{near}")
    _check_flags(arguments)
    return arguments


def _refuse(message: str) -> NoReturn:
    quoted = re.search(r"choice: '(.*?)'", message)
    flag = re.match(r"argument (\S+):", message)
    raise ConfigError("argument", quoted[1] if quoted else flag[1] if flag else "...", reason=message)


def _check_flags(arguments: argparse.Namespace) -> None:
    """Rejects flags that exclude each other, bypass `conf`, lack arguments, or name an unreadable folder."""
    for flag in ("config_name", "config_path", "experimental_rerun"):
        if (value := getattr(arguments, flag)) is not None:
            reason = "the flag is not supported: every run starts from conf/config.yaml; add a folder with --config-dir"
            raise ConfigError(f"--{flag.replace('_', '-')}", value, reason=reason)
    commands = [f"--{one.replace('_', '-')}" for one in ("run", "cfg", "multirun", "shell_completion", "info")
                if getattr(arguments, one)]  # fmt: skip
    if len(commands) > 1:
        raise ConfigError("argument", commands[-1], f"only one of {', '.join(commands)}")
    if arguments.shell_completion and not any(
        re.match(r"(install|uninstall|query)=", one) for one in arguments.overrides
    ):
        raise ConfigError(
            "argument", "--shell-completion", "install=SHELL after --shell-completion, such as install=bash"
        )
    if arguments.config_dir is not None:
        _check_config_dir(arguments.config_dir)


def _check_config_dir(folder: str) -> None:
    if not os.path.isdir(folder):
        raise ConfigError(
            "--config-dir", folder, "a folder with GROUP/OPTION.yaml files, searched like conf/"
        )
    for path in sorted((*Path(folder).glob("*.yaml"), *Path(folder).glob("*/*.yaml"))):
        try:
            read_yaml(path)
        except (OSError, ValueError) as error:
            reason = f"{path} cannot be read ({first_line(error)})"
            raise ConfigError("--config-dir", folder, reason=reason) from error


def jobs_of(conf: Path, overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of the first `COMPOSED_AHEAD` jobs of a sweep, one list per job.

    An interval has no values until a sweeper draws from it, so its key is left out here.

    Raises:
        ConfigError: Hydra cannot parse an override, a key has more than `LARGEST_AXIS` values or none, or an
            interval is typed without a sweeper.
    """
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf.resolve())):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        try:
            parsed = parser.parse_overrides(list(overrides))
        except Exception as error:  # any error may occur, as in compose_config
            raise translate(error, overrides, conf) from error
        drawn_from = any(text.startswith("hydra/sweeper=") for text in overrides)
        axes = []
        for override, text in zip(parsed, overrides, strict=True):
            if not override.is_sweep_override():
                axes.append([text])
            elif override.is_discrete_sweep():
                axes.append(_axis(override, text))
            elif not drawn_from:
                key, _, value = text.partition("=")
                raise ConfigError(
                    key,
                    value,
                    "values or a range; only a sweeper (hydra/sweeper=NAME) draws from an interval",
                )
    return [list(job) for job in itertools.islice(itertools.product(*axes), COMPOSED_AHEAD)]


def _axis(override: Override, text: str) -> list[str]:
    """Returns the overrides of one key of a sweep, one for each value."""
    key, _, value = text.partition("=")
    try:
        one = override.value()
        if (
            isinstance(one, RangeSweep)
            and next(itertools.islice(one.range(), LARGEST_AXIS, None), None) is not None
        ):
            raise ConfigError(key, value, f"at most {LARGEST_AXIS} values")
        axis = [f"{override.get_key_element()}={found}" for found in override.sweep_string_iterator()]
    except ConfigError:
        raise
    except (ValueError, OverflowError) as error:
        raise ConfigError(key, value, f"values that can be listed ({first_line(error)})") from error
    if not axis:
        raise ConfigError(key, value, "at least one option that matches")
    return axis
