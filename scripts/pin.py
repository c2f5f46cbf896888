"""Writes the exact version of every dependency, also indirect ones, into pyproject.toml.

It is run with `uv run scripts/pin.py`. `uv.lock` names download hosts, so it stays out of git; the shared pins
are uv's `constraint-dependencies`. The dependencies are resolved again, for all platforms and Python versions
at once, in a copy of the project without pins. Arguments hold packages back:

    uv run scripts/pin.py torch==2.13.0 torchvision==0.28.0

Afterwards run the tests, and commit only pyproject.toml.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from qatkit_verify.files import write_text

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
PINS = re.compile(r"^constraint-dependencies = \[.*?\]\n", re.MULTILINE | re.DOTALL)


def with_pins(text: str, pins: Sequence[str]) -> str:
    """Returns `text`, a pyproject.toml, with `constraint-dependencies` replaced by `pins`.

    Raises:
        ValueError: `text` does not have exactly one such list, or the new list differs from `pins`.
    """
    lines = "".join(f"    {_quoted(pin)},\n" for pin in pins)
    changed, count = PINS.subn(lambda _: f"constraint-dependencies = [\n{lines}]\n", text)
    if count != 1 or tomllib.loads(changed)["tool"]["uv"]["constraint-dependencies"] != list(pins):
        raise ValueError(f"{PYPROJECT.name}: [tool.uv] must have exactly one list constraint-dependencies")
    return changed


def _quoted(pin: str) -> str:
    return f"'{pin}'" if '"' in pin else f'"{pin}"'


def resolve(text: str) -> list[str]:
    """Returns all dependencies of the pyproject.toml `text`, including indirect ones.

    Each is "name==version ; marker", without a local version ("+cpu").
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, PYPROJECT.name).write_text(text, encoding="utf-8")
        Path(folder, "README.md").touch()
        command = ["uv", "export", "--project", folder, "--all-extras", "--all-groups", "--quiet"]
        command += ["--no-hashes", "--no-annotate", "--no-header", "--no-emit-project"]
        exported = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [
        re.sub(r"\+[a-z0-9.]+", "", line.strip(), count=1) for line in exported.splitlines() if line.strip()
    ]


def main(held: Sequence[str]) -> None:
    """Resolves the dependencies and writes the pins into pyproject.toml; `held` are pins ("name==version")."""
    text = PYPROJECT.read_text(encoding="utf-8")
    pins = resolve(with_pins(text, held))
    write_text(PYPROJECT, with_pins(text, pins))
    print(f"{len(pins)} pins written to {PYPROJECT.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
