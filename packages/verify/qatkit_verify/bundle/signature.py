"""Writes and checks manifest.sig: an Ed25519 signature (RFC 8032) of manifest.json and thus of all digests.

    openssl genpkey -algorithm ed25519 -out key.pem        # signs: keep it private
    openssl pkey -in key.pem -pubout -out public.pem       # checks: give it to recipients

`cryptography` (the extra `sign`) is imported only when something is signed or checked.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from qatkit_verify.bundle.manifest import MANIFEST, SIGNATURE
from qatkit_verify.errors import ConfigError
from qatkit_verify.files import write_text
from qatkit_verify.untrusted import read_text

_INSTALL = "the package cryptography: pip install 'qatkit-verify[sign]'"


def private_key(path: str | Path, key: str = "export.sign") -> Any:
    """Reads an Ed25519 private key from a PEM file without a password.

    Raises:
        ConfigError: the file does not exist or has another kind of key, or `cryptography` is not installed.
    """
    serialization, ed25519 = _library(key, path)
    try:
        found = serialization.load_pem_private_key(read_text(Path(path)).encode(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            key, path, f"an Ed25519 private key as PEM, without a password ({error})"
        ) from error
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise ConfigError(
            key, path, "an Ed25519 private key, as made by openssl genpkey -algorithm ed25519 -out FILE"
        )
    return found


def public_of(private: Any) -> str:
    """Returns the public key of a private key: its 32 bytes in base64."""
    return base64.b64encode(private.public_key().public_bytes_raw()).decode()


def sign(folder: Path, private: Any) -> None:
    """Signs manifest.json in `folder` and writes manifest.sig."""
    found = private.sign((folder / MANIFEST).read_bytes())
    write_text(folder / SIGNATURE, base64.b64encode(found).decode() + "\n")


def check_signature(folder: Path, signer: str | None, public: str | Path | None) -> str:
    """Checks manifest.sig.

    Args:
        folder: the folder of the bundle.
        signer: the public key that the manifest names; None for an unsigned bundle.
        public: a PEM file of the trusted public key. If it is None, the key that the manifest names is used.
            This proves that nobody without the private key changed the bundle, but not whose key it is.

    Returns:
        A description of the signature for the user. Without `cryptography` and `public`, it says that the
        signature was not checked.

    Raises:
        ConfigError: `public` is not the key of the signer; the signature is missing, is damaged or signs
            another manifest; the manifest names no signer, but there is a signature or `public` is given; or
            `public` is given and `cryptography` is not installed.
    """
    if signer is None:
        return _unsigned(folder, public)
    if not (folder / SIGNATURE).exists():
        missing = f"{SIGNATURE} is missing, although {MANIFEST} names a signer; get the complete bundle"
        raise ConfigError("bundle", folder, reason=missing)
    try:
        serialization, ed25519 = _library("key", public or signer)
    except ConfigError:
        if public is None:
            return f"signed by {_short(signer)}, but not checked, since this needs {_INSTALL}"
        raise
    key = ed25519.Ed25519PublicKey.from_public_bytes(_decoded(folder / MANIFEST, signer, 32))
    if (
        public is not None
        and _public(serialization, ed25519, public).public_bytes_raw() != key.public_bytes_raw()
    ):
        raise ConfigError("key", public, f"the public key of this bundle's signer, {_short(signer)}")
    _check(folder, key, signer)
    return f"signed by {_short(signer)}" + ("" if public else " (set --key to require a certain signer)")


def _check(folder: Path, key: Any, signer: str) -> None:
    try:
        text = read_text(folder / SIGNATURE)
    except (OSError, ValueError) as error:
        raise ConfigError(
            "bundle", folder / SIGNATURE, reason=f"the signature can't be read ({error})"
        ) from error
    try:
        key.verify(
            _decoded(folder / SIGNATURE, text.removesuffix("\n"), 64), (folder / MANIFEST).read_bytes()
        )
    except ConfigError:
        raise
    except Exception as error:  # InvalidSignature
        raise ConfigError(
            "bundle", folder / SIGNATURE, f"a valid signature of {MANIFEST} by {_short(signer)}"
        ) from error


def _unsigned(folder: Path, public: str | Path | None) -> str:
    if public is not None:
        raise ConfigError("key", public, reason="the bundle is not signed; leave out --key")
    if (folder / SIGNATURE).exists():
        unnamed = f"the signature cannot be checked, since {MANIFEST} names no signer"
        raise ConfigError("bundle", folder / SIGNATURE, reason=unnamed)
    return "not signed"


def _public(serialization: Any, ed25519: Any, path: str | Path) -> Any:
    try:
        found = serialization.load_pem_public_key(read_text(Path(path)).encode())
    except (OSError, ValueError) as error:
        raise ConfigError("key", path, f"an Ed25519 public key as PEM ({error})") from error
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise ConfigError("key", path, "an Ed25519 public key")
    return found


def _decoded(path: Path, text: str, size: int) -> bytes:
    """Decodes base64; rejects every spelling of the bytes except the canonical one."""
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError:
        found = b""
    if len(found) != size or base64.b64encode(found).decode() != text:
        kind = "public key" if size == 32 else "signature"
        reason = f"the file is damaged: it has no {kind} of {size} bytes in base64; get the complete bundle"
        raise ConfigError("bundle", path, reason=reason)
    return found


def _short(signer: str) -> str:
    return f"{signer[:12]}..."


def _library(key: str, value: object) -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError(key, value, reason=f"signatures need {_INSTALL}") from error
    return serialization, ed25519
