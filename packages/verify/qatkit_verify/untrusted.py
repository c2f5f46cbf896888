"""Safely reads text, JSON and YAML that others wrote, or rejects it with a reason.

A file of a few bytes can exhaust a machine's memory (YAML's aliases multiply), Python's stack (10,000
brackets) or its time (a pipe that nobody writes to). These are bounded here before a parser builds anything.
All functions raise `ValueError` (or `OSError`), whose message is the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_BYTES = 64 * 2**20  # maximum size of a text in bytes; the largest report of a run has less than 1 MB
_DEPTH = 64
_NODES = 1_000_000  # maximum number of YAML nodes, with every alias expanded


def read_text(path: Path) -> str:
    """Returns the UTF-8 text of a plain file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a plain file (a pipe is never opened), is too large, or is not UTF-8.
    """
    if path.exists() and not path.is_file():
        raise ValueError("not a plain file")
    if path.stat().st_size > _BYTES:
        raise ValueError(f"more than {_BYTES // 2**20} MiB")
    return path.read_text(encoding="utf-8-sig")


def read_json(path: Path) -> Any:
    """Returns the contents of a JSON file.

    Raises:
        OSError, ValueError: as in `read_text`, or the text is not JSON.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_yaml(path: Path) -> str:
    """Returns the text of a YAML file that is harmless to load; whether it is YAML is left to the loader.

    Raises:
        OSError, ValueError: as in `read_text`, or the text is nested too deeply, has too many values (with every
            alias expanded), or has an alias that refers to itself or to nothing.
    """
    import yaml  # the files of a bundle are also read without YAML

    text = read_text(path)
    sizes, open_nodes, names = dict[str, int](), [0], [""]
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"the alias *{event.anchor} refers to itself or to nothing")
                open_nodes[-1] += sizes[event.anchor]
            elif isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append(1)
                names.append(event.anchor or "")
            elif isinstance(event, yaml.CollectionEndEvent):
                size = open_nodes.pop()
                sizes[names.pop()] = size
                open_nodes[-1] += size
            elif isinstance(event, yaml.ScalarEvent):
                open_nodes[-1] += 1
                sizes[event.anchor or ""] = 1
            if len(open_nodes) > _DEPTH or open_nodes[-1] > _NODES:
                raise ValueError(
                    f"more than {_DEPTH} levels deep, or more than {_NODES:,} values with its aliases"
                )
    except yaml.YAMLError:
        pass  # the loader will report the place of the error
    return text
