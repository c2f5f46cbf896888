"""report.json: everything a run measured, with what is needed to trust and repeat it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from qatkit.files import write_text
from qatkit.verify.results import FileRecord, Hardware, Results

SCHEMA = 1  # raised when a key of report.json changes its meaning or goes away
_PACKAGES = ("qatkit", "torch", "torchvision", "lightning", "onnx", "onnxruntime", "numpy")
# The instruction sets that decide how fast (and how exact) 8-bit kernels are.
_ISA = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx_vnni_int8", "amx_int8", "asimddp", "i8mm")


def write_report(path: str | Path, results: Results) -> None:
    """Writes `results` as JSON.

    Raises:
        ValueError: a figure is NaN or infinite.
        OSError: the folder is not writable.
    """
    record = {"schema": SCHEMA, **results.as_dict()}
    write_text(path, json.dumps(record, indent=2, allow_nan=False, default=str) + "\n")


def file_records(folder: str | Path, names: Iterable[str]) -> list[FileRecord]:
    """Size and SHA-256 of files, by their names relative to `folder`."""
    records = []
    for name in names:
        path = Path(folder) / name
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        records.append(FileRecord(name, path.stat().st_size, digest))
    return records


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # run from a checkout, or without an extra
    return versions


def this_hardware(threads: int) -> Hardware:
    """The CPU of this machine; `threads` is what the measurements used."""
    fields = _cpuinfo()
    flags = fields.get("flags", fields.get("Features", "")).split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    isa = tuple(flag for flag in _ISA if flag in flags)
    return Hardware(name, os.cpu_count() or 1, isa, threads, f"{platform.system()} {platform.machine()}")


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo (empty where there is none)."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
