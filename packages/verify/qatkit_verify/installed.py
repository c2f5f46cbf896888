"""Whether ONNX Runtime can be imported here: it may be missing, or made for another NumPy."""

from __future__ import annotations

import contextlib
import io
from importlib import metadata

from qatkit_verify.errors import ConfigError


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
        allowed = f"one that can be imported: pip install --upgrade onnxruntime numpy ({reason})"
        raise ConfigError("onnxruntime", _version(), allowed) from error


def _version() -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("onnxruntime")
    return None
