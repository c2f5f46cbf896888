"""Reads, writes and checks manifest.json: every file of a bundle with its size and SHA-256.

    {"format": 1, "name": ..., "made_by": {package: version}, "requires": {"onnxruntime", "opset", "ir_version"},
     "onnxruntime": version that computed the golden answers, "session_options": {entry: value},
     "signer": null or the public key, "files": [{"name", "size", "sha256"}, ...], "sha256": of this text itself}

A bundle is rejected if a file differs, is missing or was added.

Format 2 is for a model of arrays; a qatkit-verify that knows only format 1 rejects it. The last digest is
that of the manifest's own bytes with 64 zeros in place of the digest. The figures are valid only with the
stored session options. Bundles of older versions of qatkit have neither the session options nor ONNX
Runtime's version. "drawn_data" and "accuracy_level" are stored only if they are set
(see `Manifest`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from qatkit_verify.errors import ConfigError
from qatkit_verify.files import write_text
from qatkit_verify.untrusted import read_text

FORMAT, FORMAT_OF_ARRAYS = 1, 2
MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
INT8_FILE, FLOAT_FILE = "model.onnx", "float.onnx"
PREPROCESS_FILE, LABELS_FILE, GOLDEN_FILE = "preprocess.json", "labels.txt", "golden.npz"
TOKENIZER_FILE = "tokenizer.json"  # only for a model of texts
ARRAYS_FILE = "model.json"  # only for a model of arrays: describes its inputs and outputs
REPORT_FILE, PAGE_FILE, CONFIG_FILE, CARD_FILE = "report.json", "report.html", "config.yaml", "card.md"
# Without these, nothing can be checked.
NEEDED = (INT8_FILE, GOLDEN_FILE)
_KEY = "bundle"
_NOTHING = "0" * 64


@dataclass(frozen=True)
class Entry:
    """A file: its path relative to the bundle (with slashes), its size in bytes, and its SHA-256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a bundle.

    Attributes:
        name: the name of the run.
        made_by: the versions of the packages that made the bundle.
        requires: "onnxruntime" (the oldest version that reads the file), "opset" and "ir_version".
        files: the entries of all files except manifest.json and manifest.sig.
        signer: base64 of the Ed25519 public key that signed it; None for an unsigned bundle.
        onnxruntime: the version of ONNX Runtime that computed the golden answers; None if it is not stored.
        session_options: the session config entries with which the figures are valid; None if not stored.
        format: the format of the bundle; an older qatkit-verify rejects a newer one.
        drawn_data: whether calibration and golden answers used random data.
        accuracy_level: the accuracy_level of the MatMulNBits operators ("level"), the value of
            `export.accuracy_level` ("asked"), and the figures of levels 0 and 4 if both were measured; None
            if the run that made the bundle did not choose a level.
    """

    name: str
    made_by: Mapping[str, str]
    requires: Mapping[str, Any]
    files: tuple[Entry, ...]
    signer: str | None = None
    onnxruntime: str | None = None
    session_options: Mapping[str, str] | None = None
    format: int = FORMAT
    drawn_data: bool = False
    accuracy_level: Mapping[str, Any] | None = None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest.

    It is written after all files except the signature, so a bundle without a manifest is incomplete.
    """
    stored = {
        "format": manifest.format,
        "name": manifest.name,
        "made_by": dict(manifest.made_by),
        "requires": dict(manifest.requires),
        **_runtime(manifest),
        **({"drawn_data": True} if manifest.drawn_data else {}),
        **({"accuracy_level": dict(manifest.accuracy_level)} if manifest.accuracy_level else {}),
        "signer": manifest.signer,
        "files": [vars(one) for one in sorted(manifest.files, key=lambda one: one.name)],
        "sha256": _NOTHING,
    }
    text = json.dumps(stored, indent=1) + "\n"
    write_text(folder / MANIFEST, text.replace(_NOTHING, _digest(text)))


def _runtime(manifest: Manifest) -> dict[str, Any]:
    options = manifest.session_options
    told = {
        "onnxruntime": manifest.onnxruntime,
        "session_options": None if options is None else dict(options),
    }
    return {key: value for key, value in told.items() if value is not None}


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest, without checking the files.

    Raises:
        ConfigError: the manifest does not exist, is damaged, or has a newer format.
    """
    path = folder / MANIFEST
    try:
        text = read_text(path)
        stored = json.loads(text)
        told = stored.get("format") if isinstance(stored, dict) else None
        if isinstance(told, int) and told > FORMAT_OF_ARRAYS:
            newer = f"format {FORMAT_OF_ARRAYS} or older; format {told} needs a newer qatkit-verify"
            raise ConfigError(_KEY, path, newer)
        own = stored["sha256"]
        if (
            path.read_bytes() != text.encode()
            or text.count(own) != 1
            or _digest(text.replace(own, _NOTHING)) != own
        ):
            raise ConfigError(_KEY, path, reason="the file is damaged: it differs from its own digest")
        return _manifest(stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = (
            f"{error} is missing"
            if isinstance(error, KeyError)
            else getattr(error, "strerror", None) or error
        )
        raise ConfigError(
            _KEY, path, reason=f"the file is missing or is not a manifest ({reason})"
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(stored: Mapping[str, Any]) -> Manifest:
    entries = tuple(Entry(str(one["name"]), int(one["size"]), str(one["sha256"])) for one in stored["files"])
    for one in entries:
        check_name(one.name)
    names = [one.name for one in entries]
    if len(set(names)) != len(names):
        raise ValueError("a file is listed twice")
    if missing := [name for name in NEEDED if name not in names]:
        raise ValueError(f"{missing[0]} is not listed")
    return Manifest(
        str(stored["name"]), dict(stored["made_by"]), dict(stored["requires"]), entries, stored["signer"],
        str(version) if (version := stored.get("onnxruntime")) else None,
        _options(stored.get("session_options")), int(stored.get("format", FORMAT)),
        bool(stored.get("drawn_data", False)),
        dict(level) if (level := stored.get("accuracy_level")) else None,
    )  # fmt: skip


def _options(stored: Any) -> dict[str, str] | None:
    if stored is None:
        return None
    found = dict(stored)
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ValueError("a value of session_options is not a string")
    return found


def check_name(name: str) -> None:
    """Raises ValueError unless `name` is a normalized, printable path inside the bundle, with slashes."""
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name
    if bad or not name or str(path) != name or not name.isprintable():
        raise ValueError(f"{name!r} is not a valid file name in a bundle")


def check_files(folder: Path, manifest: Manifest) -> int:
    """Compares every file with the manifest.

    Returns:
        The total number of bytes.

    Raises:
        ConfigError: a file is missing, differs, is a link, or is not listed; the message names the first five.
    """
    wrong = [*_wrong(folder, manifest.files), *_unlisted(folder, manifest.files)]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        reason = f"its files differ from {MANIFEST} ({', '.join(wrong[:5])}{more}); get the complete bundle"
        raise ConfigError(_KEY, folder, reason=reason)
    return sum(one.size for one in manifest.files)


def _wrong(folder: Path, files: Iterable[Entry]) -> Iterable[str]:
    for one in files:
        path = folder / one.name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            yield f"{one.name} is not a regular file"
        elif not path.is_file():
            yield f"{one.name} is missing"
        elif path.stat().st_size != one.size or sha256(path) != one.sha256:
            yield f"{one.name} has other contents"


def _unlisted(folder: Path, files: Iterable[Entry]) -> Iterable[str]:
    listed = {one.name for one in files} | {MANIFEST, SIGNATURE}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and name not in listed:
            yield f"{name} was added"


def entry(folder: Path, name: str) -> Entry:
    """Returns the entry for the current content of a file."""
    path = folder / name
    return Entry(name, path.stat().st_size, sha256(path))


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
