"""Checks whether ONNX Runtime can be imported and whether its version is in the tested range.

It also provides the commands that install missing packages.
"""

from __future__ import annotations

import contextlib
import io
import re
from importlib import metadata
from pathlib import Path

from qatkit_verify.errors import ConfigError

# The oldest and the newest ONNX Runtime that were tested. The oldest is this package's lower bound;
# qatkit, which also creates files, requires a newer one (docs/decisions/0035-bundle-checks.md).
OLDEST, NEWEST = "1.23", "1.32"
# The first version whose convolutions accept weights with a separate zero point for each output channel.
ZERO_POINTS_OF_CHANNELS = "1.27"
# The first version whose MatMulNBits accepts weights of 2 bits.
TWO_BITS = "1.24"


def in_checkout() -> bool:
    """Returns whether the code runs from a checkout, where `uv run` and `uv sync` work."""
    return (Path(__file__).parent.parent / "pyproject.toml").is_file()


def install_extra(extra: str, package: str = "qatkit") -> str:
    """Returns the command that installs an extra and keeps the installed extras."""
    return f"uv sync --inexact --extra {extra}" if in_checkout() else f"pip install '{package}[{extra}]'"


def untested(version: str) -> str:
    """Returns how an ONNX Runtime version differs from the tested ones; "" within their range."""
    oldest, newest, own = (version_numbers(one)[:2] for one in (OLDEST, NEWEST, version))
    if oldest <= own <= newest:
        return ""
    return f"{'older' if own < oldest else 'newer'} than any version that was tested ({OLDEST} to {NEWEST})"


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns the first three numbers of a version, for comparisons."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_onnxruntime() -> None:
    """Checks that ONNX Runtime can be imported; call it before importing a module that runs a file.

    Raises:
        ConfigError: ONNX Runtime cannot be imported; the message says what to install.
    """
    said = io.StringIO()  # NumPy prints a page of text if the two are incompatible
    try:
        with contextlib.redirect_stderr(said):
            import onnxruntime  # noqa: F401
    except ImportError as error:
        reason = " ".join((str(error) or said.getvalue()).split())[:120]
        failed = f"it cannot be imported ({reason}); run pip install --upgrade onnxruntime numpy"
        raise ConfigError("onnxruntime", _version() or "missing", reason=failed) from error


def _version() -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("onnxruntime")
    return None
