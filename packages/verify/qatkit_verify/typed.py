"""Parses the values of the commands' flags."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Parses an integer of at least 1, for argparse's `type`.

    Raises:
        argparse.ArgumentTypeError: the text is not such an integer, or is 2**20 or larger.
    """
    if not text.isdecimal() or not 0 < int(text) < 2**20:
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to {2**20 - 1}, not {text!r}")
    return int(text)
