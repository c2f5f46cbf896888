"""The JavaScript of a bundle: the preprocessing, and a self-check (`node verify.mjs BUNDLE`)."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from qatkit_verify.files import write_text

FOLDER = "javascript"


def modules() -> dict[str, str]:
    """Returns the sources of `qatkit_verify`'s JavaScript modules, by name."""
    folder = resources.files("qatkit_verify") / FOLDER
    return {
        one.name: one.read_text(encoding="utf-8") for one in folder.iterdir() if one.name.endswith(".mjs")
    }


def write_javascript(bundle: Path) -> None:
    """Writes the modules into a bundle's folder."""
    (bundle / FOLDER).mkdir()
    for name, source in modules().items():
        write_text(bundle / FOLDER / name, source)
