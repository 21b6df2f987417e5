"""Key slots: the master key, wrapped by a passphrase, a key file, a command or a recovery key.

Guarantees: a slot from a hostile bucket cannot make a reader allocate more than 1 GiB or compute for more
than about ten seconds, and is refused if a passphrase would be guessed too cheaply. A slot that decayed is
told apart from a wrong passphrase by its check.

References:
    docs/remote-format.md, section 4; argon2id: RFC 9106
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Annotated, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.sealing.check_field import add_check, split_check, xxh3_check
from ciuic.remote.sealing.master_key import MasterKey, hkdf
from ciuic.remote.sealing.passphrase_key import Argon2Cost, derive_key
from ciuic.remote.sealing.slot_secret import SlotKind, SlotSecret
from ciuic.repository.errors import UnsupportedFormat

SLOT_VERSION: Final = 1
MAX_SLOT_BYTES: Final = 8192
MAX_PASSPHRASE_SLOTS_TRIED: Final = 16
"""Limit of the slots that one passphrase is tried with: each takes a second or more."""
_WORDS: Final[dict[SlotKind, str]] = {
    "recovery": "recovery key",
    "key-file": "key file",
    "passphrase": "passphrase",
    "command": "key command",
}
_WAYS: Final[dict[SlotKind, str]] = {
    "recovery": "its recovery key opens it: CIUIC_REMOTE_RECOVERY_KEY=ciuic-…",
    "key-file": "the key file of a host opens it: CIUIC_REMOTE_KEY_FILE=PATH, or key_file under [remote]",
    "passphrase": "a passphrase opens it: CIUIC_REMOTE_PASSPHRASE",
    "command": "what a command prints opens it: key_command under [remote]",
}
MIN_MEMORY_KIB: Final = 19 << 10
"""Floor of OWASP's Password Storage Cheat Sheet for argon2id."""
MAX_MEMORY_KIB: Final = 1 << 20
MAX_PASSES: Final = 64
MAX_LANES: Final = 16
MAX_WORK_KIB: Final = 8 << 20
"""Limit of memory times passes: about ten seconds."""
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_INFO: Final = b"ciuic key slot v1"
_Salt = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]


DEFAULT_COST: Final = Argon2Cost()
"""0.8 s of a processor and 256 MiB, which RFC 9106 recommends as at least 64 MiB where memory is scarce."""


class StoredArgon2(msgspec.Struct, tag_field="name", tag="argon2id", frozen=True, kw_only=True):
    """Derivation of a slot's key from a passphrase."""

    memory_kib: Annotated[int, msgspec.Meta(ge=MIN_MEMORY_KIB, le=MAX_MEMORY_KIB)]
    passes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PASSES)]
    lanes: Annotated[int, msgspec.Meta(ge=1, le=MAX_LANES)]
    salt: _Salt


class StoredHkdf(msgspec.Struct, tag_field="name", tag="hkdf-sha256", frozen=True, kw_only=True):
    """Derivation of a slot's key from 32 random bytes."""

    salt: _Salt


class KeySlot(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``keys/<slot>``."""

    version: int
    slot: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]{1,32}\Z")]
    kind: SlotKind
    kdf: StoredArgon2 | StoredHkdf
    wrapped: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{120}\Z")]
    """Nonce and sealed master key, in hexadecimal digits."""
    created_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    def __post_init__(self) -> None:
        if (self.kind == "passphrase") is isinstance(self.kdf, StoredHkdf):
            raise ValueError(f"a slot of kind {self.kind} has another derivation")
        if isinstance(self.kdf, StoredArgon2) and self.kdf.memory_kib * self.kdf.passes > MAX_WORK_KIB:
            raise ValueError(f"memory_kib times passes must be at most {MAX_WORK_KIB}")


def wrap_master_key(
    master: MasterKey,
    remote_id: bytes,
    slot: str,
    secret: SlotSecret,
    *,
    created_ns: int,
    cost: Argon2Cost = DEFAULT_COST,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> bytes:
    """Return the bytes of ``keys/<slot>``.

    Args:
        master: key to wrap.
        remote_id: id of the remote, 16 bytes.
        slot: name of the slot, 1 to 32 characters of ``a-z 0-9 -``.
        secret: what opens the slot.
        created_ns: time for people, ns since 1970.
        cost: of a guess; only for a passphrase.
        random_bytes: source of salt and nonce.

    Raises:
        ValueError: name, cost or time is outside of its limits.
    """
    salt = random_bytes(_SALT_BYTES).hex()
    kdf = StoredArgon2(salt=salt, **cost._asdict()) if secret.kind == "passphrase" else StoredHkdf(salt=salt)
    nonce = random_bytes(_NONCE_BYTES)
    empty = KeySlot(
        version=SLOT_VERSION,
        slot=slot,
        kind=secret.kind,
        kdf=kdf,
        wrapped="0" * 120,
        created_ns=created_ns,
    )
    try:
        # A struct that is made does not check its fields; one that is converted does.
        msgspec.convert(msgspec.to_builtins(empty), KeySlot)
    except msgspec.ValidationError as error:
        raise ValueError(f"invalid key slot: {error}") from None
    sealed = AESGCM(_slot_key(empty, secret)).encrypt(nonce, master.reveal(), _bound(remote_id, slot))
    filled = msgspec.structs.replace(empty, wrapped=(nonce + sealed).hex())
    return add_check(msgspec.json.encode(filled), xxh3_check)


def decode_slot(slot: str, data: bytes) -> KeySlot:
    """Return the content of ``keys/<slot>``.

    Raises:
        DamagedRemote: it is no slot of this name, decayed, or its derivation is outside of the limits.
        UnsupportedFormat: a later version of ciuic wrote it.
    """
    name = f"keys/{slot}"
    if len(data) > MAX_SLOT_BYTES:
        raise DamagedRemote(name, f"it has {len(data)} bytes; {MAX_SLOT_BYTES} are the limit")
    body = split_check(name, data, xxh3_check)
    try:
        version = msgspec.json.decode(body, type=dict[str, object]).get("version")
        if version != SLOT_VERSION:
            raise UnsupportedFormat(
                f"{name} in the remote has version {version}; this ciuic reads {SLOT_VERSION}"
            )
        found = msgspec.json.decode(body, type=KeySlot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRemote(name, str(error)) from None
    if found.slot != slot:
        raise DamagedRemote(name, f"it is the slot {found.slot}")
    return found


def unwrap_master_key(slot: KeySlot, remote_id: bytes, secret: SlotSecret) -> MasterKey:
    """Return the master key.

    A passphrase takes about a second, and as much memory as the slot says (256 MiB by default), in a child process.

    Raises:
        WrongKey: the secret does not open this slot of this remote.
        CiuicError: this installation of cryptography has no argon2id.
    """
    if secret.kind != slot.kind:
        raise WrongKey(f"the key slot {slot.slot} is opened by a {slot.kind}, not by a {secret.kind}")
    wrapped = bytes.fromhex(slot.wrapped)
    try:
        key = AESGCM(_slot_key(slot, secret)).decrypt(
            wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], _bound(remote_id, slot.slot)
        )
    except InvalidTag:
        raise WrongKey(
            f"this {slot.kind} does not open the key slot {slot.slot}",
            hint="the slot itself is intact; check for another keyboard layout, or use another slot",
        ) from None
    return MasterKey(key)


def unlock(slots: Iterable[KeySlot], remote_id: bytes, secret: SlotSecret) -> tuple[KeySlot, MasterKey]:
    """Return the first slot that the secret opens, and the master key.

    Raises:
        WrongKey: it opens none.
    """
    known = list(slots)
    tried: list[str] = []
    for slot in known:
        if slot.kind != secret.kind or len(tried) == MAX_PASSPHRASE_SLOTS_TRIED:
            continue
        try:
            return slot, unwrap_master_key(slot, remote_id, secret)
        except WrongKey:
            tried.append(slot.slot)
    what = _WORDS[secret.kind]
    if not tried:
        raise WrongKey(f"the remote has no key slot for a {what}", hint=ways_in(known))
    raise WrongKey(
        f"this {what} does not open the remote; the slots of its kind are: {', '.join(tried)}",
        hint=ways_in(known),
    )


def ways_in(slots: Iterable[KeySlot]) -> str:
    """Return what opens a remote, and where to put it, for people who do not have the key that they tried."""
    kinds = {slot.kind for slot in slots}
    return "; ".join(words for kind, words in _WAYS.items() if kind in kinds)


def _slot_key(slot: KeySlot, secret: SlotSecret) -> bytes:
    """Return the key that wraps the master key."""
    salt = bytes.fromhex(slot.kdf.salt)
    if isinstance(slot.kdf, StoredHkdf):
        return hkdf(secret.reveal(), salt, _INFO)
    kdf = slot.kdf
    return derive_key(secret.reveal(), salt, Argon2Cost(kdf.memory_kib, kdf.passes, kdf.lanes))


def _bound(remote_id: bytes, slot: str) -> bytes:
    """Return the associated data of a slot."""
    return b"".join(part + b"\0" for part in (_INFO, remote_id.hex().encode(), slot.encode()))
