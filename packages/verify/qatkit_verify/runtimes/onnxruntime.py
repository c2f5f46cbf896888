"""ONNX Runtime as one of the runtimes; checks use `qatkit_verify.session` instead, with a backend's options."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from qatkit_verify.runtimes.base import REFERENCE, Execute, Runtime


def _open(path: Path, threads: int) -> Execute:
    from qatkit_verify.session import open_session

    session = open_session(path, threads=threads, arena=True)
    return lambda given: session.run(None, dict(given))


def _versions() -> Mapping[str, str]:
    return {"onnxruntime": metadata.version("onnxruntime")}


RUNTIME = Runtime(REFERENCE, _open, _versions)
