"""ONNX Runtime as it is installed here: whether it can be imported, and whether its version was ever tested."""

from __future__ import annotations

import contextlib
import io
import re
from importlib import metadata

from qatkit_verify.errors import ConfigError

# The oldest and the newest ONNX Runtime that were tried. The oldest is this package's lower bound;
# qatkit, which also makes files, asks for a newer one (docs/decisions/0035-bundle-checks.md).
OLDEST, NEWEST = "1.23", "1.32"
# The first whose convolutions take weights with a zero point of its own for each output channel.
ZERO_POINTS_OF_CHANNELS = "1.27"
# The first whose MatMulNBits takes weights of 2 bits.
TWO_BITS = "1.24"


def untested(version: str) -> str:
    """Returns how an ONNX Runtime version compares with those that were tried; "" inside their range."""
    oldest, newest, own = (version_numbers(one)[:2] for one in (OLDEST, NEWEST, version))
    if oldest <= own <= newest:
        return ""
    return f"{'older' if own < oldest else 'newer'} than any version that was tested ({OLDEST} to {NEWEST})"


def version_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, to compare it by."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def check_onnxruntime() -> None:
    """To be asked before anything of this package is imported that runs a file.

    Raises:
        ConfigError: it can't be imported; what to install.
    """
    said = io.StringIO()  # a page of NumPy's, where the two do not fit
    try:
        with contextlib.redirect_stderr(said):
            import onnxruntime  # noqa: F401
    except ImportError as error:
        reason = " ".join((str(error) or said.getvalue()).split())[:120]
        allowed = f"a version that can be imported: pip install --upgrade onnxruntime numpy ({reason})"
        raise ConfigError("onnxruntime", _version(), allowed) from error


def _version() -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("onnxruntime")
    return None
