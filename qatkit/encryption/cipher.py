"""Encrypts and decrypts one file: AES-256-GCM in chunks whose nonces encode the position and mark the last chunk.

    "qatkitE1" ─ check of the key, 8 bytes ─ salt, 16 random bytes ─ chunk 0 ─ chunk 1 ─ ... ─ the last chunk

    key of the file  = HKDF-SHA256(key, salt, "file"), so that no nonce is ever used twice with the same key
    nonce of chunk i = i as 11 bytes, then 1 for the last chunk or 0 for any other
    chunk            = up to 1 MiB of the content and a tag of 16 bytes, which also authenticates the 32 bytes before
                       the first chunk

If a chunk was changed, moved, removed or added, its tag does not match. A truncated file is detected as well, since
only the last chunk is marked as such. This is the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár 2015), which
the age format uses too. The check of the key distinguishes a wrong key from a damaged file and reveals nothing about
the key.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from qatkit_verify.errors import ConfigError, counted, first_line
from qatkit_verify.installed import install_extra

KEY_SETTING = "export.encrypt"
KEY_BYTES = 32
_MAGIC = b"qatkitE1"
_CHECK, _SALT, _TAG = 8, 16, 16
_HEADER = len(_MAGIC) + _CHECK + _SALT
_CHUNK = 2**20
_LARGEST_KEY_FILE = 1024


class WrongKeyError(ValueError):
    """Raised for a file that was encrypted with another key."""


def new_key(path: Path) -> None:
    """Writes a random key as one line of 64 hexadecimal digits, to a file that only its owner can read.

    Raises:
        FileExistsError: the file exists. If a key were overwritten, its encrypted files could no longer be read.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_key(path: str, setting: str = KEY_SETTING) -> bytes:
    """Returns the 32 bytes of the key in a file, which contains 64 hexadecimal digits or the bytes themselves.

    Args:
        path: the path of the file.
        setting: the setting or the argument that contains the path, for messages.

    Raises:
        ConfigError: the file contains no key or cannot be read, or `cryptography` is not installed.
    """
    allowed = (
        "a key file with 64 hexadecimal digits or 32 bytes, as written by python -m qatkit.encryption.command key"
        " FILE"
    )
    if importlib.util.find_spec("cryptography") is None:
        reason = f"encryption needs the extra sign; install it with {install_extra('sign')}"
        raise ConfigError(setting, path, reason=reason)
    try:
        if not Path(path).is_file():
            raise ValueError("not a file")
        if Path(path).stat().st_size > _LARGEST_KEY_FILE:
            raise ValueError("too large")
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise ConfigError(setting, path, f"{allowed} ({reason})") from error
    if re.fullmatch(rb"\s*[0-9a-fA-F]{64}\s*", content):
        content = bytes.fromhex(content.decode())
    if len(content) != KEY_BYTES:
        raise ConfigError(setting, path, f"{allowed} ({counted(len(content), 'byte')})")
    return content


def is_encrypted(path: Path) -> bool:
    """Returns whether a file begins like an encrypted file of this format; False if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def encrypt(source: Path, target: Path, key: bytes) -> None:
    """Encrypts the file `source` into `target`, which is overwritten."""
    salt = secrets.token_bytes(_SALT)
    header = _MAGIC + _derived(key, b"", b"check", _CHECK) + salt
    cipher = _cipher(key, salt)
    with source.open("rb") as plain, target.open("wb") as stream:
        stream.write(header)
        for number, chunk, last in _chunks(plain, _CHUNK):
            stream.write(cipher.encrypt(_nonce(number, last), chunk, header))


def decrypt(source: Path, target: Path, key: bytes) -> None:
    """Decrypts the file `source` into `target`; an error may leave `target` incomplete.

    Raises:
        WrongKeyError: `source` was encrypted with another key.
        ValueError: `source` is damaged, incomplete, or not in this format.
    """
    from cryptography.exceptions import InvalidTag

    with source.open("rb") as stream, target.open("wb") as plain:
        header = stream.read(_HEADER)
        if len(header) != _HEADER or not header.startswith(_MAGIC):
            raise ValueError("not encrypted by qatkit")
        if header[len(_MAGIC) : -_SALT] != _derived(key, b"", b"check", _CHECK):
            raise WrongKeyError("encrypted with another key")
        cipher = _cipher(key, header[-_SALT:])
        for number, chunk, last in _chunks(stream, _CHUNK + _TAG):
            try:
                plain.write(cipher.decrypt(_nonce(number, last), chunk, header))
            except InvalidTag:
                raise ValueError("damaged or cut off") from None


def _chunks(stream: IO[bytes], size: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yields the chunks as (number, bytes, whether it is the last one); an empty file has one empty chunk."""
    number, chunk = 0, stream.read(size)
    while True:
        following = stream.read(size)
        yield number, chunk, not following
        if not following:
            return
        number, chunk = number + 1, following


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _cipher(key: bytes, salt: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_derived(key, salt, b"file", KEY_BYTES))


def _derived(key: bytes, salt: bytes, purpose: bytes, length: int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return bytes(HKDF(SHA256(), length, salt, b"qatkit " + purpose).derive(key))
