"""Tests of encrypted files: an independent decryption, and the rejection of every change."""

from __future__ import annotations

import hashlib
import hmac
import random
import stat
from pathlib import Path

import pytest

from qatkit.encryption import command
from qatkit.encryption.cipher import WrongKeyError, decrypt, encrypt, is_encrypted, new_key, read_key
from qatkit.encryption.vault import readable, secret
from qatkit_verify.errors import ConfigError

pytest.importorskip("cryptography", reason="the extra sign is not installed")

CHUNK, TAG, HEADER = 2**20, 16, 32
KEY = bytes(range(32))


def encrypted(folder: Path, content: bytes, key: bytes = KEY) -> Path:
    (folder / "plain").write_bytes(content)
    encrypt(folder / "plain", folder / "secret", key)
    return folder / "secret"


def by_hand(stored: bytes, key: bytes) -> bytes:
    """Returns the content as decrypted by an independent implementation, with RFC 5869's HKDF written out."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    header, body = stored[:HEADER], stored[HEADER:]
    extracted = hmac.digest(header[16:], key, hashlib.sha256)
    cipher = AESGCM(hmac.digest(extracted, b"qatkit file\x01", hashlib.sha256))
    chunks = [body[i : i + CHUNK + TAG] for i in range(0, len(body), CHUNK + TAG)]
    nonces = [i.to_bytes(11, "big") + bytes([i == len(chunks) - 1]) for i in range(len(chunks))]
    return b"".join(cipher.decrypt(nonce, chunk, header) for nonce, chunk in zip(nonces, chunks, strict=True))


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_what_went_in_comes_out(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    file = encrypted(tmp_path, content)
    assert is_encrypted(file) and by_hand(file.read_bytes(), KEY) == content
    assert file.stat().st_size == HEADER + size + TAG * max(1, -(-size // CHUNK))
    decrypt(file, tmp_path / "out", KEY)
    assert (tmp_path / "out").read_bytes() == content


def test_equal_contents_are_never_encrypted_equally(tmp_path: Path) -> None:
    first = encrypted(tmp_path, b"x" * 1000).read_bytes()
    second = encrypted(tmp_path, b"x" * 1000).read_bytes()
    assert first[:16] == second[:16]  # identifies the key, which is the same
    assert first[16:32] != second[16:32] and first[32:] != second[32:]


def refused(folder: Path, stored: bytes) -> bool:
    (folder / "changed").write_bytes(stored)
    try:
        decrypt(folder / "changed", folder / "out", KEY)
    except ValueError:
        return True
    return False


def test_every_change_is_refused(tmp_path: Path) -> None:
    draw = random.Random(0)
    stored = encrypted(tmp_path, draw.randbytes(2 * CHUNK + 100)).read_bytes()
    assert not refused(tmp_path, stored)
    for place in [*range(HEADER), *(draw.randrange(len(stored)) for _ in range(30)), len(stored) - 1]:
        changed = bytearray(stored)
        changed[place] ^= 1 << draw.randrange(8)
        assert refused(tmp_path, bytes(changed))
    whole = CHUNK + TAG
    first, second, last = (stored[HEADER + i * whole : HEADER + (i + 1) * whole] for i in range(3))
    head = stored[:HEADER]
    for other in (
        *(stored[:length] for length in (0, 1, HEADER, HEADER + 1, HEADER + whole, HEADER + 2 * whole)),
        *(stored[:-1], stored[: -len(last) // 2]),
        *(head + second + first + last, head + first + last, head + second + last, head + last),
        *(stored + last, stored + b"\0", head + first + first + second + last),
    ):  # fmt: skip
        assert refused(tmp_path, other)


def test_a_wrong_key_is_not_a_damage(tmp_path: Path) -> None:
    file = encrypted(tmp_path, b"weights")
    with pytest.raises(WrongKeyError, match="another key"):
        decrypt(file, tmp_path / "out", bytes(32))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "not a file"),
        (b"", "0 bytes"),
        (b"short", "5 bytes"),
        (b"0" * 63, "63 bytes"),
        (b"0" * 66, "66 bytes"),
        (bytes(33), "33 bytes"),
        (b"x" * 10_000, "too large"),
    ],
)
def test_a_file_without_a_key_is_one_line(tmp_path: Path, content: bytes | None, told: str) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"export\.encrypt=.*{told}"):
        read_key(str(tmp_path / "key"))


def test_a_new_key_is_random_and_for_its_owner_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert command.main(["key", str(tmp_path / name)]) == 0
    assert read_key(str(tmp_path / "one")) != read_key(str(tmp_path / "two"))
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600
    before = (tmp_path / "one").read_bytes()
    assert command.main(["key", str(tmp_path / "one")]) == 2  # its files could never be read again
    assert (tmp_path / "one").read_bytes() == before
    (tmp_path / "raw").write_bytes(KEY)
    assert read_key(str(tmp_path / "raw")) == KEY


def test_an_encrypted_file_is_opened_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_key(tmp_path / "key")
    file = encrypted(tmp_path, b"weights", read_key(str(tmp_path / "key")))
    typed = ["open", str(file), str(tmp_path / "key"), str(tmp_path / "out")]
    assert command.main(typed) == 0
    assert (tmp_path / "out").read_bytes() == b"weights"
    (tmp_path / "out").unlink()
    new_key(tmp_path / "other")
    assert command.main(["open", str(file), str(tmp_path / "other"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {file}: the file is encrypted with another key\n"
    assert command.main(["open", str(file), str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: key={tmp_path / 'none'}: expected a key file with 64 ")
    assert command.main(["open", str(tmp_path / "none"), str(tmp_path / "key"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: No such file or directory\n"
    assert {path.name for path in tmp_path.iterdir()} == {"key", "other", "plain", "secret"}


def test_without_a_key_files_stay_plain_and_encrypted_ones_fail(tmp_path: Path) -> None:
    with secret(tmp_path / "file") as temporary:
        temporary.write_bytes(b"weights")
    assert (tmp_path / "file").read_bytes() == b"weights"
    with readable(tmp_path / "file") as plain:
        assert plain == tmp_path / "file"
    file = encrypted(tmp_path, b"weights")
    with (
        pytest.raises(ConfigError, match=rf"export\.encrypt=null: expected the key that {file}"),
        readable(file),
    ):
        pass
