"""Master key of a remote: 32 random bytes from which every other key is derived.

References:
    docs/remote-format.md, sections 3 to 5; HKDF: RFC 5869
"""

from __future__ import annotations

import hmac
import os
from typing import Final, NoReturn

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MASTER_KEY_BYTES: Final = 32
REMOTE_ID_BYTES: Final = 16
_NAMING_INFO: Final = b"ciuic naming key v1"
_BORDER_INFO: Final = b"ciuic border seed v1"


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """Return ``length`` bytes of HKDF-SHA256 (RFC 5869) of the secret."""
    return HKDF(algorithm=SHA256(), length=length, salt=salt, info=info).derive(secret)


class MasterKey:
    """32 secret bytes. They appear in no repr and no pickle; `reveal` is for wrapping them alone."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) != MASTER_KEY_BYTES:
            raise ValueError(f"a master key must have {MASTER_KEY_BYTES} bytes, got {len(secret)}")
        self._secret = bytes(secret)

    @classmethod
    def generate(cls) -> MasterKey:
        """Return a new random key."""
        return cls(os.urandom(MASTER_KEY_BYTES))

    def derive(self, salt: bytes, info: bytes, length: int = 32) -> bytes:
        """Return ``length`` bytes of HKDF-SHA256 of this key."""
        return hkdf(self._secret, salt, info, length)

    def naming_key(self, remote_id: bytes) -> bytes:
        """Return the BLAKE3 key of chunk ids of the remote, 32 bytes."""
        return self.derive(remote_id, _NAMING_INFO)

    def border_seed(self, remote_id: bytes) -> int:
        """Return the seed of tree borders of the remote, a 64-bit number."""
        return int.from_bytes(self.derive(remote_id, _BORDER_INFO, 8), "big")

    def reveal(self) -> bytes:
        """Return the secret bytes, for a key slot or a recovery key."""
        return self._secret

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MasterKey) and hmac.compare_digest(self._secret, other._secret)

    # Not hashable: a key in a set or dict would be compared by hash, which depends on the secret.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "MasterKey(<secret>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a master key cannot be pickled or copied")
