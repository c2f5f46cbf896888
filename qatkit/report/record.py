"""The file report.json: everything that a run measured, with the information needed to verify and repeat it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from qatkit.encryption.vault import readable
from qatkit.records.results import FileRecord, Results
from qatkit_verify.files import write_text

SCHEMA = 1  # version, increased if a key of report.json changes its meaning or is removed


def write_report(path: str | Path, results: Results) -> None:
    """Writes `results` as JSON.

    Raises:
        ValueError: a figure is NaN or infinite.
        OSError: the folder is not writable.
    """
    record = {"schema": SCHEMA, **results.as_dict()}
    write_text(path, json.dumps(record, indent=2, allow_nan=False, default=str) + "\n")


def file_records(folder: str | Path, names: Iterable[str]) -> list[FileRecord]:
    """Returns the size and SHA-256 of the files `names` in `folder`.

    For an encrypted file, they are those of the decrypted content.
    """
    records = []
    for name in names:
        with readable(Path(folder) / name) as plain, plain.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            records.append(FileRecord(name, plain.stat().st_size, digest))
    return records
