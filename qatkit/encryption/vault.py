"""Writes and reads secret files, with or without a key.

with protected(config.export.encrypt):  # once, around a job
with secret(path) as temporary: ...     # writes the file atomically, encrypted if there is a key
with readable(path) as plain: ...       # the file itself, or its decrypted content in memory
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qatkit.encryption.cipher import KEY_SETTING, WrongKeyError, decrypt, encrypt, is_encrypted, read_key
from qatkit.encryption.memory import temporary_files_in_memory
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import whole


class _Held:
    """The key of the current job of this process, and the file from which it was read."""

    key: bytes | None = None
    file: str | None = None


def key_held() -> bytes | None:
    """Returns the key of this process's job; None if the job encrypts nothing."""
    return _Held.key


def key_file_held() -> str | None:
    """Returns the file from which the key was read; None if the job encrypts nothing."""
    return _Held.file


@contextmanager
def protected(key_file: str | None) -> Iterator[None]:
    """Within the block, makes `secret` encrypt and puts temporary files in memory.

    Does nothing without a key file, or within the block of another call with the same key file.

    Raises:
        ConfigError: the file contains no key, `cryptography` is not installed, or this machine has no folder in memory.
    """
    if key_file is None or (_Held.key is not None and _Held.file == key_file):  # for a run within a run
        yield
        return
    key = read_key(key_file)
    with temporary_files_in_memory(key_file):
        _Held.key, _Held.file = key, key_file
        try:
            yield
        finally:
            _Held.key = _Held.file = None


@contextmanager
def secret(path: str | Path) -> Iterator[Path]:
    """Yields a path to write to; at the end of the block, `path` gets this content, encrypted if there is a key.

    Without a key, this is `files.whole`. With a key, the yielded path is in memory. If the block raises an
    error, `path` stays as it was.
    """
    if _Held.key is None:
        with whole(path) as temporary:
            yield temporary
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / Path(path).name
        plain.touch()
        yield plain
        encrypted_copy(plain, Path(path))


def encrypted_copy(plain: Path, path: Path) -> None:
    """Writes `path` atomically as an encrypted copy of `plain`; only for jobs with a key."""
    assert _Held.key is not None
    with whole(path) as temporary:
        encrypt(plain, temporary, _Held.key)


@contextmanager
def readable(path: str | Path) -> Iterator[Path]:
    """Yields a path with the unencrypted content of a file: `path` itself, or a decrypted copy in memory.

    Raises:
        ConfigError: the encrypted file is damaged, or this job has no key or another one.
    """
    path = Path(path)
    if not is_encrypted(path):
        yield path
        return
    if _Held.key is None:
        raise ConfigError(KEY_SETTING, "null", f"the key that {path} was encrypted with")
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.name
        try:
            decrypt(path, plain, _Held.key)
        except WrongKeyError as error:
            allowed = f"the key that {path} was encrypted with; this is another key"
            raise ConfigError(KEY_SETTING, _Held.file, allowed) from error
        except ValueError as error:
            reason = f"the encrypted file {path} is {error}; copy or create it again"
            raise ConfigError(KEY_SETTING, _Held.file, reason=reason) from error
        yield plain
