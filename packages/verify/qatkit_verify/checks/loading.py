"""Checks whether the ONNX Runtime that is installed here reads the file."""

from __future__ import annotations

import onnxruntime as ort

from qatkit_verify.checks.base import OK, CheckInputs, Found
from qatkit_verify.errors import ConfigError
from qatkit_verify.installed import version_numbers
from qatkit_verify.onnx_file import read_onnx
from qatkit_verify.session import open_session


def loading(asked: CheckInputs) -> Found:
    """Returns the result if the file loads.

    Raises:
        ConfigError: the file does not load; the message names the required version if the installed one is
            older, else ONNX Runtime's reason.
    """
    needed = str(asked.manifest.requires.get("onnxruntime", "0"))
    told = read_onnx(asked.int8)
    try:
        open_session(asked.int8, threads=asked.threads, options=asked.options)
    except ConfigError as error:
        if version_numbers(ort.__version__) < version_numbers(needed):
            asks = f"opset {told.opsets.get('', '?')}, IR version {told.ir_version}"
            allowed = f"{needed} or newer; this version cannot load {asks}"
            raise ConfigError("onnxruntime", ort.__version__, allowed) from error
        raise
    seen = (
        f"ONNX Runtime {ort.__version__} reads opset {told.opsets.get('', '?')}, IR version {told.ir_version}"
    )
    figures = {"onnxruntime": ort.__version__, "opset": told.opsets.get(""), "ir_version": told.ir_version}
    return Found("loads", OK, seen, figures=figures)
