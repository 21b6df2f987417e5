"""Open a remote from all versions of its objects: also one that was deleted, or whose remote.json and key slots were replaced.

With a key the pair of remote.json and key slot that it authenticates is found, in any of their versions. Without one the oldest
remote.json counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from ciuic.errors import Damaged, NotFound
from ciuic.remote.access.remote import Remote, opened_remote
from ciuic.remote.errors import WrongKey
from ciuic.remote.format.names import KEYS_PREFIX, REMOTE_JSON, parse_slot, slot_name
from ciuic.remote.format.remote_json import MAX_REMOTE_JSON_BYTES, is_sealed, open_remote, read_remote_id
from ciuic.remote.objects.model import RemoteRefused
from ciuic.remote.objects.versions import NameVersions, ObjectVersions, Version, group_versions
from ciuic.remote.sealing.key_slot import (
    MAX_PASSPHRASE_WORK_KIB,
    MAX_SLOT_BYTES,
    KeySlot,
    decode_slot,
    digits_of,
    own_digits,
    unwrap_master_key,
    work_kib,
)
from ciuic.remote.sealing.master_key import MasterKey
from ciuic.remote.sealing.slot_secret import SlotSecret
from ciuic.remote.versions.sound_objects import SoundObjects
from ciuic.remote.versions.verification import VersionCheck
from ciuic.repository.errors import UnsupportedFormat

_THREADS: Final = 16
_BATCH: Final = 256
# The oldest versions of slots: an attacker may make up any number.
_MAX_VERSIONS: Final = 1 << 16


class RemoteVersions(NamedTuple):
    """Remote that was opened from all versions, and what it was opened from."""

    remote: Remote
    objects: SoundObjects
    """Its objects; ``slot`` is the key slot that opened it."""


def open_remote_versions(
    versions: ObjectVersions, secrets: Sequence[SlotSecret], *, before_ns: int | None = None
) -> RemoteVersions:
    """Open the remote from the versions that verify.

    Args:
        versions: All versions of the remote's objects.
        secrets: Passphrases and keys; none for a remote in clear.
        before_ns: Leave out what was stored at this time or later (ns since 1970); None for nothing.

    Raises:
        NotFound: nothing was ever stored as remote.json.
        WrongKey: no secret fits any version, or one is needed.
        DamagedRemote: no version is as it was stored.
    """
    candidates = _remote_jsons(versions, before_ns)
    if not candidates:
        raise NotFound(
            f"there was never a remote at {versions.url}, as far as its versions tell",
            hint="check the URL, and that the bucket keeps versions",
        )
    if not secrets:
        # The oldest: the name is created once, and a replacement comes later.
        data, master, slot = candidates[0], None, ("", b"")
        if is_sealed(data):
            raise WrongKey(
                f"the remote at {versions.url} is sealed: a passphrase or key is needed",
                hint="set CIUIC_REMOTE_PASSPHRASE or CIUIC_REMOTE_KEY_FILE, or key_file under [remote]",
            )
    else:
        data, master, slot = _unlocked(versions, candidates, secrets, before_ns)
    verification = VersionCheck(read_remote_id(data), master)
    objects = SoundObjects(versions, verification, before_ns, slot=slot)
    return RemoteVersions(opened_remote(objects, data, master), objects)


def _remote_jsons(versions: ObjectVersions, before_ns: int | None) -> list[bytes]:
    """Return all different contents of remote.json that are well-formed, the oldest first."""
    found = []
    for data in _contents(versions, REMOTE_JSON, MAX_REMOTE_JSON_BYTES, before_ns):
        try:
            is_sealed(data)
        except (Damaged, UnsupportedFormat):
            continue
        found.append(data)
    return found


def _unlocked(
    versions: ObjectVersions,
    candidates: Sequence[bytes],
    secrets: Sequence[SlotSecret],
    before_ns: int | None,
) -> tuple[bytes, MasterKey, tuple[str, bytes]]:
    """Return the remote.json that a secret authenticates, by any version of a slot, and that slot: name and content."""
    sealed = [data for data in candidates if is_sealed(data)]
    ids = [read_remote_id(data) for data in sealed]
    own = {own_digits(id_, secret) for id_ in ids for secret in secrets if secret.kind != "passphrase"}
    spent_kib = 0
    tried = 0
    for slot, content in _slots(versions, before_ns, own):
        for secret in secrets:
            if slot.kind != secret.kind:
                continue
            tried += 1
            for data, remote_id in zip(sealed, ids, strict=True):
                spent_kib += work_kib(slot)
                if spent_kib > MAX_PASSPHRASE_WORK_KIB:
                    raise WrongKey(
                        f"the passphrase was tried for about a minute, with {tried - 1} versions of key slots: there are too many versions",
                        hint="use the recovery key or a key file, or leave out later versions with --stored-before",
                    )
                try:
                    master = unwrap_master_key(slot, remote_id, secret)
                    open_remote(data, master)
                except (WrongKey, Damaged):
                    continue
                return data, master, (slot_name(slot.slot), content)
    if not sealed:
        raise WrongKey(
            f"remote.json of {versions.url} says in all versions that the remote is not sealed, but a key was given"
        )
    raise WrongKey(
        f"no key opens any of {tried} versions of key slots at {versions.url} that are of its kind"
    )


def _slots(
    versions: ObjectVersions, before_ns: int | None, own: Collection[str]
) -> Iterator[tuple[KeySlot, bytes]]:
    """Yield the versions of key slots that are well-formed: of those that ``own`` digits name first, and the oldest first."""

    def order(version: Version) -> tuple[bool, int]:
        # Forged versions come later than what was there.
        return digits_of(version.name.removeprefix(KEYS_PREFIX)) not in own, version.modified_ns

    known = (
        version
        for found in group_versions(versions.list(KEYS_PREFIX), before_ns)
        if (name := parse_slot(found.name)) and digits_of(name) in ("", *own)
        for version in found.versions
        if version.size_bytes <= MAX_SLOT_BYTES
    )
    left = heapq.nsmallest(_MAX_VERSIONS, known, key=order)
    with ThreadPoolExecutor(_THREADS) as threads:
        for at in range(0, len(left), _BATCH):
            for found in threads.map(lambda version: _slot(versions, version), left[at : at + _BATCH]):
                if found is not None:
                    yield found


def _slot(versions: ObjectVersions, version: Version) -> tuple[KeySlot, bytes] | None:
    """Return a version of a slot and its content; None for what is none."""
    try:
        content = bytes(versions.read(version, 0, MAX_SLOT_BYTES))
        return decode_slot(version.name.removeprefix(KEYS_PREFIX), content), content
    except (Damaged, UnsupportedFormat, NotFound, RemoteRefused):
        return None


def _contents(versions: ObjectVersions, name: str, max_bytes: int, before_ns: int | None) -> Iterator[bytes]:
    groups = group_versions(versions.list(name), before_ns)
    found = next((one for one in groups if one.name == name), NameVersions(name, 0, (), None))
    for version in found.versions:
        if version.size_bytes <= max_bytes:
            try:
                yield bytes(versions.read(version, 0, max_bytes))
            except NotFound:
                continue
