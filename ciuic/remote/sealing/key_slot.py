"""Key slots: the master key, wrapped by a passphrase, a key file, a command or a recovery key.

Guarantees: a slot from a hostile bucket cannot make a reader allocate more than 1 GiB or compute for more
than about ten seconds, and is refused if a passphrase would be guessed too cheaply. Any number of slots cost a
passphrase about a minute, and only derivations that are made count. A slot that decayed is told apart from a wrong
passphrase by its check.

References:
    docs/remote-format.md, section 4; argon2id: RFC 9106
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.sealing.passphrase_key import Argon2Cost, derive_key
from ciuic.remote.sealing.sealer import MasterKey, add_check, hkdf, split_check, xxh3_check
from ciuic.remote.sealing.slot_secret import SlotKind, SlotSecret
from ciuic.repository.errors import UnsupportedFormat

SLOT_VERSION: Final = 1
MAX_SLOT_BYTES: Final = 8192
MAX_PASSPHRASE_WORK_KIB: Final = 48 << 20
"""Limit of memory times passes that a passphrase is tried with, in all slots together: 64 slots of the default cost, about a minute."""
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
_NAME_INFO: Final = b"ciuic key slot name v1 "
_NAME_BYTES: Final = 6
_OWN_NAME: Final = re.compile(r"host(?:-[a-z0-9-]{1,14})?-([0-9a-f]{12})\Z")
_NOT_SLOT: Final = re.compile("[^a-z0-9-]+")
_MAX_HOST_CHARACTERS: Final = 14
_MAX_NAMES_SHOWN: Final = 8
GoesOn = Callable[[int], bool]
"""Returns whether a passphrase is tried with more slots; gets how many it was tried with."""
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


def own_slot(remote_id: bytes, secret: SlotSecret, host: str) -> str:
    """Return the name of the slot that a host makes for its key: a label for people, and digits that depend on the key alone.

    Raises:
        ValueError: the secret is a passphrase, about which such a name would tell something.
    """
    label = _NOT_SLOT.sub("-", host.lower()).strip("-")[:_MAX_HOST_CHARACTERS].strip("-")
    return "-".join(filter(None, ("host", label, own_digits(remote_id, secret))))


def own_digits(remote_id: bytes, secret: SlotSecret) -> str:
    """Return the 12 digits at the end of `own_slot`."""
    if secret.kind == "passphrase":
        raise ValueError("a passphrase has no slot of its own: its name would be a cheap test of guesses")
    return hkdf(secret.reveal(), remote_id, _NAME_INFO + secret.kind.encode(), _NAME_BYTES).hex()


def digits_of(slot: str) -> str:
    """Return the digits at the end of a name that `own_slot` made; an empty text for another name."""
    found = _OWN_NAME.match(slot)
    return found[1] if found else ""


def work_kib(slot: KeySlot) -> int:
    """Return memory times passes of one derivation of the slot's key; 0 where it takes microseconds."""
    return slot.kdf.memory_kib * slot.kdf.passes if isinstance(slot.kdf, StoredArgon2) else 0


def unlock(
    slots: Iterable[KeySlot], remote_id: bytes, secret: SlotSecret, *, goes_on: GoesOn | None = None
) -> tuple[KeySlot, MasterKey]:
    """Return the first slot that the secret opens, and the master key.

    Args:
        slots: In the order in which they are tried; consumed no further than needed.
        remote_id: Id of the remote, 16 bytes.
        secret: Passphrase or key.
        goes_on: Asked each time that the slots have cost a passphrase MAX_PASSPHRASE_WORK_KIB; None for no.

    Raises:
        WrongKey: it opens none, or a passphrase none of those that it was tried with.
    """
    known: list[KeySlot] = []
    tried: list[str] = []
    spent_kib = 0
    what = _WORDS[secret.kind]
    for slot in slots:
        known.append(slot)
        if slot.kind != secret.kind:
            continue
        if spent_kib and spent_kib + work_kib(slot) > MAX_PASSPHRASE_WORK_KIB:
            if goes_on is None or not goes_on(len(tried)):
                raise WrongKey(
                    f"this {what} does not open any of the {len(tried)} key slots that it was tried with, and there are more",
                    hint="CIUIC_REMOTE_SLOT=NAME has the slot NAME tried first (ciuic remote keys list); or use a key file or recovery key, "
                    "and remove the slots that nobody of you has made (ciuic remote keys remove)",
                )
            spent_kib = 0
        spent_kib += work_kib(slot)
        try:
            return slot, unwrap_master_key(slot, remote_id, secret)
        except WrongKey:
            tried.append(slot.slot)
    if not tried:
        raise WrongKey(f"the remote has no key slot for a {what}", hint=ways_in(known))
    raise WrongKey(
        f"this {what} does not open the remote; the slots of its kind are: {shown_names(tried)}",
        hint=ways_in(known),
    )


def shown_names(names: Sequence[str]) -> str:
    """Return the names for a message, the first ones of many."""
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


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
