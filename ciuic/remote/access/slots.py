"""The key slots that lie in a remote: found by name where a name is known, read and tried in a chosen order elsewhere.

Guarantees: a host finds the slot of its key with one request, however many there are; nothing that somebody else puts below ``keys/``
keeps a secret from a slot that it opens, or ends a listing: an object that is no usable slot is skipped and named.

References:
    docs/remote-format.md, section 4
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from ciuic.errors import CiuicError, Damaged
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.format.names import KEYS_PREFIX, is_slot, slot_name
from ciuic.remote.log.bounded import read_document
from ciuic.remote.objects.model import (
    NoSuchObject,
    ObjectInfo,
    Objects,
    RemoteRefused,
    RemoteUnreachable,
)
from ciuic.remote.objects.verified import READS
from ciuic.remote.sealing.key_slot import (
    DEFAULT_COST,
    MAX_SLOT_BYTES,
    GoesOn,
    KeySlot,
    decode_slot,
    digits_of,
    own_digits,
    own_slot,
    shown_names,
    unlock,
    work_kib,
)
from ciuic.remote.sealing.master_key import MasterKey
from ciuic.remote.sealing.slot_secret import SlotKind, SlotSecret
from ciuic.repository import log
from ciuic.repository.errors import UnsupportedFormat

_THREADS: Final = 16
_BATCH: Final = 256
_USUAL: Final[dict[SlotKind, tuple[str, ...]]] = {
    "passphrase": ("passphrase",),
    "recovery": ("recovery",),
    "key-file": ("host", "key-file"),
    "command": ("host", "command"),
}
"""Names that ``init`` and ``keys add`` give where no other is chosen: tried before the remote is listed."""
_DEFAULT_WORK_KIB: Final = DEFAULT_COST.memory_kib * DEFAULT_COST.passes


class UnusableSlot(NamedTuple):
    """Object below ``keys/`` that is no key slot that this version of ciuic can use."""

    slot: str
    """Name without ``keys/``."""
    problem: CiuicError


class KeySlots:
    """Key slots of one remote, each read at most once.

    Args:
        objects: Objects of the remote.
        host: Name of this host, which is a part of the name of its slot.
    """

    def __init__(self, objects: Objects, *, host: str | None = None) -> None:
        self._objects = objects
        self._host = socket.gethostname() if host is None else host
        self._read: dict[str, KeySlot | None] = {}
        self._unusable: dict[str, CiuicError] = {}
        self._listed: list[ObjectInfo] | None = None

    @property
    def unusable(self) -> list[UnusableSlot]:
        """Objects below ``keys/`` that were met so far and cannot be used."""
        return [UnusableSlot(*one) for one in sorted(self._unusable.items())]

    def all(self) -> list[KeySlot]:
        """Return all slots that can be used, in the order of the listing; `unusable` has the others."""
        return list(self._slots(info.name.removeprefix(KEYS_PREFIX) for info in self._infos()))

    def any_but(self, slot: str) -> bool:
        """Return whether there is a usable slot besides this one."""
        others = (info.name.removeprefix(KEYS_PREFIX) for info in self._infos())
        return any(True for _ in self._slots(other for other in others if other != slot))

    def any_object(self) -> bool:
        """Return whether there is any object below ``keys/``, a slot or not."""
        return bool(self._infos())

    def has(self, slot: str) -> bool:
        """Return whether there is an object of this name, a slot or not."""
        return any(info.name == KEYS_PREFIX + slot for info in self._infos())

    def unlock(
        self, remote_id: bytes, secret: SlotSecret, *, first: str = "", goes_on: GoesOn | None = None
    ) -> tuple[KeySlot, MasterKey]:
        """Return the slot that the secret opens, and the master key.

        Args:
            remote_id: Id of the remote, 16 bytes.
            secret: Passphrase or key.
            first: Name of a slot that is tried before all others; empty for none.
            goes_on: As in `ciuic.remote.sealing.key_slot.unlock`.

        Raises:
            WrongKey: it opens none.
            DamagedRemote, UnsupportedFormat, RemoteRefused: there is no usable slot at all, or the listing has none.
            RemoteUnreachable: it opens none, and one could not be read.
        """
        try:
            found = unlock(self._in_order(remote_id, secret, first), remote_id, secret, goes_on=goes_on)
        except WrongKey as error:
            if not self._infos():
                # Nobody can make a sealed remote without one.
                raise DamagedRemote(
                    KEYS_PREFIX,
                    "its listing is empty, and a sealed remote has key slots",
                    hint="a proxy may have answered in place of the store, or somebody deleted all key slots",
                ) from None
            problems = self.unusable
            for one in problems:
                if isinstance(one.problem, RemoteUnreachable):
                    raise one.problem from None
            if len(problems) >= len(self._infos()) > 0:
                raise problems[0].problem from None
            if problems:
                names = shown_names([one.slot for one in problems])
                raise WrongKey(
                    f"{error.message}; not usable as key slots: {names}", hint=error.hint
                ) from None
            raise
        if self._unusable:
            log.warning(
                "remote_key_slots_unusable",
                slots=shown_names(sorted(self._unusable)),
                remote=self._objects.url,
            )
        return found

    def _in_order(self, remote_id: bytes, secret: SlotSecret, first: str) -> Iterator[KeySlot]:
        """Yield the slots that the secret may open, the most plausible first."""
        has_own = secret.kind != "passphrase"
        digits = own_digits(remote_id, secret) if has_own else ""
        own = own_slot(remote_id, secret, self._host) if has_own else ""
        known = list(dict.fromkeys(filter(is_slot, (first, own, *_USUAL[secret.kind]))))
        for slot in known:
            yield from self._slots([slot])
        # The oldest first, by the store's clock: what an attacker plants comes later than what was there.
        by_age = sorted(self._infos(), key=lambda info: info.modified_ns)
        names = [info.name.removeprefix(KEYS_PREFIX) for info in by_age]
        names = [name for name in names if name not in known]
        if has_own:
            # The host may have had another name.
            yield from self._slots(name for name in names if digits_of(name) == digits)
        # A name with digits tells that another key opens the slot.
        others = self._slots(name for name in names if not digits_of(name))
        if has_own:
            yield from others
        else:
            yield from sorted(others, key=lambda slot: work_kib(slot) != _DEFAULT_WORK_KIB)
        # Read for what can be said of the ways in.
        yield from self._slots([name for name in names if digits_of(name) not in ("", digits)][:1])

    def _infos(self) -> list[ObjectInfo]:
        """Return the listing, and take note of what cannot be a slot."""
        if self._listed is None:
            self._listed = list(self._objects.list(KEYS_PREFIX))
            for _ in range(READS - 1):
                if not self._listed:
                    # A client may take the page of a proxy for a listing without objects.
                    self._objects.reconnect()
                    self._listed = list(self._objects.list(KEYS_PREFIX))
            for info in self._listed:
                slot = info.name.removeprefix(KEYS_PREFIX)
                if not is_slot(slot):
                    reason = "the name of a key slot has 1 to 32 characters of a-z, 0-9 and -"
                    self._unusable[slot] = DamagedRemote(info.name, reason)
                elif info.size_bytes > MAX_SLOT_BYTES:
                    reason = f"it has {info.size_bytes} bytes; {MAX_SLOT_BYTES} are the limit"
                    self._unusable[slot] = DamagedRemote(info.name, reason)
        return self._listed

    def _slots(self, names: Iterable[str]) -> Iterator[KeySlot]:
        """Yield the usable slots of these names in this order, many at a time where they are many."""
        left = [name for name in names if name not in self._unusable]
        for at in range(0, len(left), _BATCH):
            batch = left[at : at + _BATCH]
            missing = [name for name in batch if name not in self._read]
            if len(missing) > 1:
                with ThreadPoolExecutor(min(_THREADS, len(missing))) as threads:
                    self._read.update(zip(missing, threads.map(self._slot, missing), strict=True))
            else:
                self._read.update((name, self._slot(name)) for name in missing)
            yield from (slot for name in batch if (slot := self._read[name]) is not None)

    def _slot(self, name: str) -> KeySlot | None:
        """Return the slot; None where there is none, or none that can be used."""
        try:
            return read_document(
                self._objects, slot_name(name), lambda data: decode_slot(name, data), MAX_SLOT_BYTES
            )
        except NoSuchObject:
            return None
        except (Damaged, UnsupportedFormat, RemoteRefused, RemoteUnreachable) as error:
            self._unusable[name] = error
            return None
