"""Stores a checksum in a checkpoint, so that one that was damaged by a disk or a transfer is never resumed.

    zip archive of torch.save ... end of central directory ─ length of the comment ─ "sha256:" + 64 digits

The comment of the archive, which every reader skips, contains the digest of all bytes before the comment's length. Any
flipped bit in the file is found, even in names and padding, which the archive's own checksums do not cover. The digest
is in the same file as the data, so that a kill cannot separate them. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
from pathlib import Path

_MARK = b"sha256:"
_COMMENT = len(_MARK) + 64
_TAIL = 2 + _COMMENT  # bytes of the comment and its length, the last field of the archive
_END = b"PK\x05\x06"  # the last 22 bytes of an archive without a comment begin with this
_END_BYTES = 22


def seal(path: Path) -> None:
    """Writes the digest into an archive that has just been written and has no comment.

    Raises:
        ValueError: the file is not such an archive.
    """
    with path.open("r+b") as stream:
        content = stream.read()
        if content[-_END_BYTES:-18] != _END or content[-2:] != b"\0\0":
            raise ValueError(f"{path} is not a zip archive, or has a comment already")
        stream.seek(len(content) - 2)
        stream.write(struct.pack("<H", _COMMENT) + _MARK + _digest(content[:-2]))


def damage(path: Path) -> str:
    """Returns a description of what is wrong with a checkpoint; "" if nothing is wrong.

    A checkpoint of an older version has no digest, so the archive's own checksums are tested instead.
    """
    content = path.read_bytes()
    if content[-_TAIL:-_COMMENT] == struct.pack("<H", _COMMENT) and content[-_COMMENT:].startswith(_MARK):
        return "" if content[-64:] == _digest(content[:-_TAIL]) else "its checksum does not match"
    if content[-_END_BYTES:-18] != _END or content[-2:] != b"\0\0":
        return "empty" if not content else "not a complete archive"
    try:
        member = zipfile.ZipFile(path).testzip()
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, ValueError) as error:
        return str(error) or type(error).__name__
    return "" if member is None else f"{member} fails its checksum"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
