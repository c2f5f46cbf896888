"""A checksum inside of a checkpoint, so that one that was damaged on a disk or on the way is never gone on from.

    zip archive of torch.save ... end of central directory ─ length of the comment ─ "sha256:" + 64 digits

The comment of the archive, which every reader skips, holds the digest of all bytes before its length; a flipped bit
anywhere in the file is found, in names and paddings too, that the archive's own checksums leave out. One file holds
both, so that no kill can part them. No torch here.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
from pathlib import Path

_MARK = b"sha256:"
_COMMENT = len(_MARK) + 64
_TAIL = 2 + _COMMENT  # with its length, the last field of the archive
_END = b"PK\x05\x06"  # of a directory without a comment the last 22 bytes begin so
_END_BYTES = 22


def seal(path: Path) -> None:
    """Writes the digest into an archive that has just been written, and has no comment.

    Raises:
        ValueError: no such archive.
    """
    with path.open("r+b") as stream:
        content = stream.read()
        if content[-_END_BYTES:-18] != _END or content[-2:] != b"\0\0":
            raise ValueError(f"{path}: a zip archive without a comment")
        stream.seek(len(content) - 2)
        stream.write(struct.pack("<H", _COMMENT) + _MARK + _digest(content[:-2]))


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, in words; "" for a whole one.

    One of an older version, without a digest, is asked for its archive's own checksums.
    """
    content = path.read_bytes()
    if content[-_TAIL:-_COMMENT] == struct.pack("<H", _COMMENT) and content[-_COMMENT:].startswith(_MARK):
        return "" if content[-64:] == _digest(content[:-_TAIL]) else "its checksum does not fit"
    if content[-_END_BYTES:-18] != _END or content[-2:] != b"\0\0":
        return "empty" if not content else "not a whole archive"
    try:
        member = zipfile.ZipFile(path).testzip()
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, ValueError) as error:
        return str(error) or type(error).__name__
    return "" if member is None else f"{member} fails its checksum"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
