"""The command `python -m qatkit.encryption.command`: `key FILE` makes a key, `open FILE KEYFILE OUTPUT` decrypts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from qatkit.encryption.cipher import decrypt, new_key, read_key
from qatkit_verify.errors import ConfigError, first_line
from qatkit_verify.files import whole


def main(typed: Sequence[str] | None = None) -> int:
    """Makes a new key or decrypts a file; returns the exit status: 0, or 2 for an error."""
    parser = argparse.ArgumentParser("python -m qatkit.encryption.command")
    commands = parser.add_subparsers(dest="command", required=True)
    key = commands.add_parser("key", help="write a new random key")
    key.add_argument("file", type=Path)
    opened = commands.add_parser("open", help="decrypt a file")
    for name in ("file", "key", "output"):
        opened.add_argument(name, type=Path)
    given = parser.parse_args(typed)
    try:
        if given.command == "key":
            new_key(given.file)
        else:
            with whole(given.output) as temporary:
                decrypt(given.file, temporary, read_key(str(given.key), "key"))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {error.filename or given.file}: {error.strerror or first_line(error)}", file=sys.stderr
        )
        return 2
    except ValueError as error:
        print(f"error: {given.file}: the file is {first_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
