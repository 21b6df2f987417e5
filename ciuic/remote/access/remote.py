"""An open remote, and how it is made and opened.

References:
    docs/remote-format.md, sections 3 and 4
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.remote.access.secrets import first_slot
from ciuic.remote.access.slots import KeySlots
from ciuic.remote.errors import WrongKey
from ciuic.remote.format.names import KEYS_PREFIX, REMOTE_JSON, repository_prefix, slot_name
from ciuic.remote.format.remote_json import (
    MAX_REMOTE_JSON_BYTES,
    StoredRemote,
    encode_remote,
    encode_repository,
    is_sealed,
    read_remote_id,
)
from ciuic.remote.format.remote_json import open_remote as open_stored
from ciuic.remote.log.bounded import read_document, read_object
from ciuic.remote.objects.model import NoSuchObject, Objects, check_name
from ciuic.remote.objects.prefixed import PrefixedObjects
from ciuic.remote.objects.verified import read_verified
from ciuic.remote.sealing.key_slot import (
    GoesOn,
    KeySlot,
    digits_of,
    own_digits,
    shown_names,
    ways_in,
    wrap_master_key,
)
from ciuic.remote.sealing.master_key import MasterKey
from ciuic.remote.sealing.sealer import Sealer
from ciuic.remote.sealing.slot_secret import SlotSecret
from ciuic.repository import Repository
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import Identity


class RemoteExists(CiuicError):
    """There is a remote at this place already."""


class Remote(NamedTuple):
    """An open remote, or the space of one repository in it."""

    objects: Objects
    """Store, with the names of docs/remote-format.md, section 2."""
    stored: StoredRemote
    sealer: Sealer
    identity: Identity
    """Hash, key and seed by which chunks are named."""
    master: MasterKey | None
    """None for a remote that is not sealed."""

    @property
    def id(self) -> str:
        """Id of the remote, 32 hexadecimal digits."""
        return self.stored.id

    def __repr__(self) -> str:
        return f"Remote({self.objects.url!r}, id={self.id!r}, sealed={self.stored.sealed})"


def init_remote(
    objects: Objects, *, master: MasterKey | None, block_size: int, identity: Identity | None = None
) -> Remote:
    """Make a remote, and open it. The caller has proved create-only, and adds key slots before anything else.

    Args:
        objects: Store, with an empty prefix.
        master: New master key; None for a remote that is not sealed.
        block_size: Bytes in a block of the repositories that will join.
        identity: How chunks are named, for a remote that is not sealed; None for a random one.

    Raises:
        RemoteExists: there is a remote already.
    """
    remote_id = os.urandom(16)
    if master is None and identity is None:
        identity = Identity("blake3-128", os.urandom(32), int.from_bytes(os.urandom(8), "big"))
    data = encode_remote(
        remote_id=remote_id,
        master=master,
        block_size=block_size,
        created_ns=time.time_ns(),
        identity=identity,
    )
    # A lost reply looks like somebody else's remote: the id decides.
    if not objects.create(REMOTE_JSON, data) and objects.get(REMOTE_JSON) != data:
        raise RemoteExists(f"there is a remote at {objects.url} already", hint="ciuic remote join uses it")
    return opened_remote(objects, data, master)


def open_remote(
    objects: Objects,
    secrets: Sequence[SlotSecret],
    *,
    expected_id: bytes | None = None,
    goes_on: GoesOn | None = None,
) -> Remote:
    """Open the remote with the first of the secrets that fits.

    Args:
        objects: Store.
        secrets: Passphrases and keys; none for a remote that is not sealed.
        expected_id: Id that the caller knows, 16 bytes: of the remote that this host has joined.
        goes_on: Asked whether a passphrase is tried with more slots once that took about a minute; None for no.

    Raises:
        NotFound: there is no remote.
        WrongKey: no secret fits, or none was given for a sealed remote.
        DamagedRemote: remote.json was altered, or all key slots were.
    """
    failed: dict[bytes, CiuicError] = {}

    def opened() -> Remote:
        data = read_object(objects, REMOTE_JSON, MAX_REMOTE_JSON_BYTES)
        if data in failed:
            # The same bytes: a passphrase is not tried once more with each key slot.
            raise failed[data]
        try:
            return opened_remote(objects, data, _unlocked(objects, data, secrets, goes_on), expected_id)
        except (Damaged, UnsupportedFormat, WrongKey) as error:
            failed[data] = error
            raise

    try:
        # A bit that flips in the id, with which the slots are opened, looks like a wrong key.
        return read_verified(objects, opened, also=(WrongKey,))
    except NoSuchObject:
        raise NotFound(
            f"there is no remote at {objects.url}",
            hint="ciuic remote init makes one; one that was deleted from a bucket with versions is read with --behind-deletions",
        ) from None


def repository_space(remote: Remote, repository: Repository) -> Remote:
    """Return where the snapshots of this repository go, and make that space if it is missing.

    It is the remote itself if the repository names chunks as the remote does, else a space of its own.

    Raises:
        DamagedRemote: the space was altered.
    """
    if remote.identity == repository.identity and remote.stored.block_size == repository.block_size:
        return remote
    objects = PrefixedObjects(remote.objects, repository_prefix(repository.id).rstrip("/"))
    data = encode_repository(
        repository_id=bytes.fromhex(repository.id),
        master=remote.master,
        block_size=repository.block_size,
        created_ns=time.time_ns(),
        identity=repository.identity,
    )
    # Whichever stands has the same identity, or is refused below.
    if not objects.create(REMOTE_JSON, data):
        return _opened_space(objects, remote, repository.id)
    return opened_remote(objects, data, remote.master, bytes.fromhex(repository.id))


def repository_spaces(remote: Remote) -> list[Remote]:
    """Return the spaces of all repositories with an identity of their own."""
    spaces = []
    ids = dict.fromkeys(
        found.name.split("/")[1]
        for found in remote.objects.list("repositories/")
        if found.name.endswith(f"/{REMOTE_JSON}")
    )
    for repository_id in ids:
        objects = PrefixedObjects(remote.objects, repository_prefix(repository_id).rstrip("/"))
        spaces.append(_opened_space(objects, remote, repository_id))
    return spaces


def _opened_space(objects: Objects, remote: Remote, repository_id: str) -> Remote:
    return read_document(
        objects,
        REMOTE_JSON,
        lambda data: opened_remote(objects, data, remote.master, bytes.fromhex(repository_id)),
        MAX_REMOTE_JSON_BYTES,
    )


def add_slot(remote: Remote, slot: str, secret: SlotSecret) -> None:
    """Add a key slot; durable on return.

    Raises:
        RemoteExists: there is a slot of this name.
        ValueError: the name is impossible or belongs to another key, or the remote is not sealed.
    """
    if remote.master is None:
        raise ValueError("a remote that is not sealed has no key slots")
    if (digits := digits_of(slot)) and (
        secret.kind == "passphrase" or digits != own_digits(bytes.fromhex(remote.id), secret)
    ):
        # No reader would try it.
        raise ValueError(f"the name {slot} says that another key opens the slot: choose another name")
    data = wrap_master_key(remote.master, bytes.fromhex(remote.id), slot, secret, created_ns=time.time_ns())
    name = slot_name(slot)
    if not remote.objects.create(name, data) and remote.objects.get(name) != data:
        raise RemoteExists(f"there is a key slot {slot} already", hint="choose another name, or remove it")


def key_slots(objects: Objects) -> list[KeySlot]:
    """Return all key slots that can be used."""
    return KeySlots(objects).all()


def remove_slot(remote: Remote, slot: str) -> None:
    """Remove a key slot, or what else has such a name. Who has copied a slot and knows its secret can still open the remote.

    Raises:
        NotFound: there is no such slot.
        ValueError: no other one can be used; without any, everything in the remote would be lost. Or the store cannot be asked to
            delete an object of this name.
    """
    slots = KeySlots(remote.objects)
    if not slots.has(slot):
        names = shown_names([one.slot for one in slots.all()])
        raise NotFound(f"the remote has no key slot {slot}", hint=f"it has: {names}")
    check_name(KEYS_PREFIX + slot)
    if not slots.any_but(slot):
        raise ValueError("the last key slot cannot be removed: everything in the remote would be lost")
    remote.objects.delete([KEYS_PREFIX + slot])


def _unlocked(
    objects: Objects, data: bytes, secrets: Sequence[SlotSecret], goes_on: GoesOn | None
) -> MasterKey | None:
    """Return the master key; None for a remote that says it is not sealed and no secret was given."""
    if not is_sealed(data):
        # An attacker who can write to the bucket could otherwise have everything sent in clear from now on.
        if secrets:
            raise WrongKey(
                f"remote.json of {objects.url} says that the remote is not sealed, but a key was given",
                hint="somebody replaced remote.json, or the key belongs to another remote",
            )
        return None
    slots = KeySlots(objects)
    if not secrets:
        raise WrongKey(
            f"the remote at {objects.url} is sealed: a passphrase or key is needed", hint=ways_in(slots.all())
        )
    failure: CiuicError | None = None
    for secret in secrets:
        try:
            return slots.unlock(read_remote_id(data), secret, first=first_slot(), goes_on=goes_on)[1]
        except WrongKey as error:
            failure = error
    assert failure is not None
    raise failure


def opened_remote(
    objects: Objects, data: bytes, master: MasterKey | None, expected_id: bytes | None = None
) -> Remote:
    """Return the remote that the bytes of its remote.json describe.

    Raises:
        DamagedRemote, WrongKey, UnsupportedFormat: as `ciuic.remote.format.remote_json.open_remote`.
    """
    opened = open_stored(data, master, expected_id=expected_id)
    return Remote(objects, opened.stored, opened.sealer, opened.identity, master)
