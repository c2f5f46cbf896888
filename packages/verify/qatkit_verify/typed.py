"""What is typed behind the flags of the commands here."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number from 1 on, as argparse's `type`."""
    if not text.isdecimal() or not 0 < int(text) < 2**20:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 on")
    return int(text)
