"""Access to a remote: make one, open it with the secrets of a person or of the configuration, and manage its key slots.

Guarantees:

* A remote is made only in a store that proved create-only; who opens one has authenticated its remote.json where
  it is sealed.
* A host finds the slot of its key with one request, however many there are. Nothing that somebody else puts below
  ``keys/`` keeps a secret from a slot that it opens, or ends a listing: an object that is no usable slot is skipped
  and named.
* No remote is made where another one has left objects, and what is lost of its identity comes back from a host
  that has key and id (`repair_identity`).
* A process without a terminal finds secrets in the environment, in a key file and by a key command.

References:
    docs/remote-format.md, sections 3 and 4
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.config import RemoteConfig
from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.remote.documents import (
    MAX_REMOTE_JSON_BYTES,
    LogCommit,
    LogHello,
    StoredRemote,
    encode_remote,
    encode_repository,
    is_sealed,
    read_document,
    read_entry,
    read_object,
    read_remote_id,
)
from ciuic.remote.documents import open_remote as open_stored
from ciuic.remote.errors import DamagedRemote, PacksElsewhere, WrongKey
from ciuic.remote.object_names import (
    KEYS_PREFIX,
    LOGS_PREFIX,
    MANIFESTS_PREFIX,
    PACKS_PREFIX,
    REMOTE_JSON,
    REPOSITORIES_PREFIX,
    ROUNDS_PREFIX,
    is_slot,
    parse_log_entry,
    parse_manifest,
    parse_pack,
    parse_round,
    repository_prefix,
    slot_name,
    space_json,
)
from ciuic.remote.objects.model import (
    READS,
    ArchivedObject,
    NoSuchObject,
    ObjectInfo,
    Objects,
    RemoteRefused,
    RemoteUnreachable,
    check_name,
    read_verified,
)
from ciuic.remote.objects.opening import open_objects
from ciuic.remote.objects.urls import StoreSettings
from ciuic.remote.objects.wrappers import PrefixedObjects
from ciuic.remote.sealing.key_slots import (
    DEFAULT_COST,
    MAX_SLOT_BYTES,
    GoesOn,
    KeySlot,
    SlotKind,
    SlotSecret,
    decode_slot,
    digits_of,
    own_digits,
    own_slot,
    passphrase_secret,
    read_key_file,
    recovery_secret,
    run_key_command,
    shown_names,
    unlock,
    ways_in,
    work_kib,
    wrap_master_key,
)
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.repository import Repository, log
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.identity import Identity
from ciuic.repository.repository import unmake_empty
from ciuic.units import plural

_SLOT_THREADS: Final = 16
_SLOT_BATCH: Final = 256
_USUAL_SLOTS: Final[dict[SlotKind, tuple[str, ...]]] = {
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
            goes_on: As in `ciuic.remote.sealing.key_slots.unlock`.

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
        known = list(dict.fromkeys(filter(is_slot, (first, own, *_USUAL_SLOTS[secret.kind]))))
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
        for at in range(0, len(left), _SLOT_BATCH):
            batch = left[at : at + _SLOT_BATCH]
            missing = [name for name in batch if name not in self._read]
            if len(missing) > 1:
                with ThreadPoolExecutor(min(_SLOT_THREADS, len(missing))) as threads:
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


PASSPHRASE_VARIABLE: Final = "CIUIC_REMOTE_PASSPHRASE"
KEY_FILE_VARIABLE: Final = "CIUIC_REMOTE_KEY_FILE"
RECOVERY_VARIABLE: Final = "CIUIC_REMOTE_RECOVERY_KEY"
_SLOT_VARIABLE: Final = "CIUIC_REMOTE_SLOT"
# systemd.exec(5): files that a unit got by LoadCredential=.
_CREDENTIALS_VARIABLE: Final = "CREDENTIALS_DIRECTORY"


def configured_secrets(
    config: RemoteConfig | None, environ: Mapping[str, str] | None = None
) -> list[SlotSecret]:
    """Return the secrets that are configured, those of the environment first; none for none.

    The credential of the unit (``ciuic.remote-key.<name>``, else ``ciuic.remote-key``) goes before ``key_file``.

    Args:
        config: The remote's part of the configuration; None where there is none.
        environ: Environment; None for that of the process.

    Raises:
        UsageError, NotFound, NotPermitted: a secret that is named cannot be had.
    """
    variables = os.environ if environ is None else environ
    found = []
    if passphrase := variables.get(PASSPHRASE_VARIABLE):
        found.append(passphrase_secret(passphrase))
    if recovery := variables.get(RECOVERY_VARIABLE):
        found.append(recovery_secret(recovery))
    if path := variables.get(KEY_FILE_VARIABLE):
        found.append(read_key_file(path))
    if config is None:
        return found
    credential = _credential(config.name, variables.get(_CREDENTIALS_VARIABLE, ""))
    if credential:
        found.append(read_key_file(credential))
    elif config.key_file is not None:
        found.append(read_key_file(str(config.key_file)))
    if config.key_command:
        found.append(run_key_command(config.key_command))
    return found


def _first_slot(environ: Mapping[str, str] | None = None) -> str:
    """Return the key slot that is to be tried first; an empty text for none."""
    return (os.environ if environ is None else environ).get(_SLOT_VARIABLE, "")


def _credential(name: str, directory: str) -> str:
    """Return the path of the credential for this remote, or an empty text."""
    paths = (f"{directory}/ciuic.remote-key.{name}", f"{directory}/ciuic.remote-key")
    return next((path for path in paths if directory and os.path.exists(path)), "")


# Where the URL of the space of one repository ends.
_SPACE_END: Final = re.compile(r"/repositories/[0-9a-f]{32}\Z")


class RemoteExists(CiuicError):
    """There is a remote at this place already."""


class LostIdentity(DamagedRemote):
    """Objects of a remote are there, and its remote.json is not: without it nobody can open them."""

    def __init__(self, url: str, found: str) -> None:
        super().__init__(
            REMOTE_JSON,
            f"it is missing at {url}, where {found} belongs to a remote",
            hint="never make another remote in its place; ciuic remote repair-identity, on a host that has used the remote, writes it again",
        )


# What a name of each kind must be: objects of others are ignored.
_TRACES: Final[tuple[tuple[str, Callable[[str], object]], ...]] = (
    (KEYS_PREFIX, lambda name: is_slot(name.removeprefix(KEYS_PREFIX))),
    (LOGS_PREFIX, parse_log_entry),
    (PACKS_PREFIX, parse_pack),
    (MANIFESTS_PREFIX, parse_manifest),
    (ROUNDS_PREFIX, parse_round),
    (REPOSITORIES_PREFIX, lambda name: _SPACE_END.match("/" + "/".join(name.split("/")[:2]))),
)
_TRACES_LISTED: Final = 1000


def refuse_lost_identity(objects: Objects) -> None:
    """Raise LostIdentity where a remote without remote.json has left objects. A LIST for each kind."""
    for prefix, is_ours in _TRACES:
        found = next((one for one in islice(objects.list(prefix), _TRACES_LISTED) if is_ours(one.name)), None)
        # Asked for last: whoever makes a remote at this moment begins with remote.json.
        if found is not None and objects.info(REMOTE_JSON) is None:
            raise LostIdentity(objects.url, found.name)


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
    objects: Objects,
    *,
    master: MasterKey | None,
    block_size: int,
    identity: Identity | None = None,
) -> Remote:
    """Make a remote, and open it. The caller has proved create-only, and adds key slots before anything else.

    Args:
        objects: Store, with an empty prefix.
        master: New master key; None for a remote that is not sealed.
        block_size: Bytes in a block of the repositories that will join.
        identity: How chunks are named, for a remote that is not sealed; None for a random one.

    Raises:
        RemoteExists: there is a remote already.
        LostIdentity: there is one that has lost its remote.json.
    """
    refuse_lost_identity(objects)
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
        LostIdentity: it has lost its remote.json.
        WrongKey: no secret fits, or none was given for a sealed remote.
        DamagedRemote: remote.json was altered, or all key slots were.
        PacksElsewhere: its packs lie in another place than its log.
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
        refuse_lost_identity(objects)
        raise NotFound(
            f"there is no remote at {objects.url}",
            hint="ciuic remote init makes one; one that was deleted from a bucket with versions is read with --behind-deletions",
        ) from None


def repair_identity(
    objects: Objects,
    secrets: Sequence[SlotSecret],
    *,
    known_ids: Iterable[str],
    repository: Repository | None,
    block_size: int,
) -> Remote:
    """Write remote.json again where it was lost, from what this host has; durable on return.

    The id is one that this host knows, or that of the packs, if a key slot, or an object in clear, verifies with it.

    Args:
        objects: Store.
        secrets: Keys of this host; none for a remote that is not sealed.
        known_ids: Ids that the remote may have, of 32 hexadecimal digits.
        repository: Repository of this host; None for none.
        block_size: Bytes in a block where no repository shares chunks over the remote yet.

    Raises:
        RemoteExists: it is there.
        NotFound: nothing of a remote is there.
        WrongKey: no key opens a slot with any of the ids.
        CiuicError: the size of blocks is not known here.
    """
    if objects.info(REMOTE_JSON) is not None:
        raise RemoteExists(f"{REMOTE_JSON} is there at {objects.url}; nothing was written")
    packs = list(islice(objects.list(PACKS_PREFIX), _HEADERS_READ))
    ids = dict.fromkeys((*known_ids, *filter(None, (_id_in_pack(objects, info.name) for info in packs))))
    slots = KeySlots(objects)
    is_sealed_one = slots.any_object()
    created_ns = min((info.modified_ns for info in objects.list(KEYS_PREFIX)), default=time.time_ns())
    foreign = False
    for id_ in ids:
        remote_id = bytes.fromhex(id_)
        master = _master_of(slots, remote_id, secrets) if is_sealed_one else None
        if is_sealed_one and master is None:
            continue
        identity = None if repository is None else repository.identity
        if master is None:
            shares = repository is not None and _has_log_of(objects, remote_id, repository)
        else:
            shares = identity == Identity(
                "blake3-128", master.naming_key(remote_id), master.border_seed(remote_id)
            )
        if not shares and (packs or master is None):
            foreign = True
            continue
        data = encode_remote(
            remote_id=remote_id,
            master=master,
            block_size=repository.block_size if repository is not None and shares else block_size,
            created_ns=created_ns,
            identity=None if is_sealed_one else identity,
        )
        opened = opened_remote(objects, data, master)
        if not objects.create(REMOTE_JSON, data) and objects.get(REMOTE_JSON) != data:
            raise RemoteExists(f"{REMOTE_JSON} is there at {objects.url} by now; nothing was written")
        return opened
    if foreign:
        raise CiuicError(
            f"the repository of this host shares no chunks over {objects.url}, so that its blocks are not known here",
            hint="run it on a host that joined the remote before its first snapshot",
        )
    if not ids:
        raise NotFound(
            f"nothing at {objects.url}, or known to this host, tells the id of a remote",
            hint="if nothing was ever uploaded to it: remove what is below keys/ with the tools of the store; ciuic remote init makes it anew",
        )
    raise WrongKey(
        f"no key of this host opens a key slot at {objects.url} with any of {plural(len(ids), 'id')}",
        hint="run it on another host that has used the remote, or with its recovery key",
    )


# Headers of packs that are read for the id of a remote: all have the same one.
_HEADERS_READ: Final = 4
_ID_IN_PACK: Final = (32, 16)


def _id_in_pack(objects: Objects, name: str) -> str:
    """Return the id of the remote in the header of a pack, which is in clear; empty if the object has none."""
    try:
        (found,) = objects.get_ranges(name, [_ID_IN_PACK])
    except (NoSuchObject, RemoteRefused):
        return ""
    return bytes(found).hex() if len(found) == _ID_IN_PACK[1] else ""


def _master_of(slots: KeySlots, remote_id: bytes, secrets: Sequence[SlotSecret]) -> MasterKey | None:
    for secret in secrets:
        with suppress(WrongKey):
            return slots.unlock(remote_id, secret)[1]
    return None


def _has_log_of(objects: Objects, remote_id: bytes, repository: Repository) -> bool:
    """Return whether a log of a remote in clear verifies with this id, and has this repository among those that share chunks."""
    if repository.identity.hash != "blake3-128":
        return False
    sealer = Sealer(remote_id, None)
    for info in objects.list(LOGS_PREFIX):
        if position := parse_log_entry(info.name):
            with suppress(DamagedRemote, NoSuchObject, UnsupportedFormat):
                entry = read_entry(objects, sealer, position.writer, position.number)
                if isinstance(entry, LogHello | LogCommit) and entry.repository == repository.id:
                    return True
    return False


def repository_space(remote: Remote, repository: Repository, *, make: bool = True) -> Remote:
    """Return where the snapshots of this repository go, and make that space if it is missing.

    It is the remote itself if the repository names chunks as the remote does, else a space of its own.

    Raises:
        DamagedRemote: the space was altered.
        NoSuchObject: without ``make``: it is missing.
    """
    if shares_chunks(repository, remote):
        return remote
    objects = PrefixedObjects(remote.objects, repository_prefix(repository.id).rstrip("/"))
    if not make:
        return _opened_space(objects, remote, repository.id)
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


def repository_spaces(
    remote: Remote, found: Mapping[str, bool] | None = None, damaged: list[DamagedRemote] | None = None
) -> list[Remote]:
    """Return the spaces of all repositories with an identity of their own, as `find_spaces` found them.

    Args:
        remote: The remote.
        found: What was found; None: it is looked for.
        damaged: Receives the spaces whose remote.json cannot be read, which are left out, so that one planted object does
            not hide all others. None: the first such error is raised.
    """
    spaces = []
    for repository_id, is_whole in (find_spaces(remote.objects) if found is None else found).items():
        if is_whole:
            objects = PrefixedObjects(remote.objects, repository_prefix(repository_id).rstrip("/"))
            try:
                spaces.append(_opened_space(objects, remote, repository_id))
            except (*_UNREADABLE, NoSuchObject) as error:
                if damaged is None:
                    raise
                name = f"{remote.objects.url}/{space_json(repository_id)}"
                reason = error.reason if isinstance(error, DamagedRemote) else error.message
                hint = (
                    error.hint if isinstance(error, UnsupportedFormat) else f"delete it, then {_SPACE_HINT}"
                )
                damaged.append(DamagedRemote(name, f"{reason}; {_NOT_SHOWN}", hint=hint))
    return spaces


def lost_spaces(objects: Objects, found: Mapping[str, bool]) -> list[DamagedRemote]:
    """Return what there is to say of each space without a remote.json, as `find_spaces` found them."""
    return [
        DamagedRemote(
            f"{objects.url}/{space_json(id_)}",
            f"it is missing; {_NOT_SHOWN}",
            hint=_SPACE_HINT,
        )
        for id_, is_whole in found.items()
        if not is_whole
    ]


# Of one that is sealed by another key, or by none where the remote is sealed, too: anybody can plant these.
_UNREADABLE: Final = (Damaged, UnsupportedFormat, WrongKey, PacksElsewhere, ArchivedObject)
_NOT_SHOWN: Final = "the snapshots of this repository are not shown"
_SPACE_HINT: Final = (
    "ciuic remote upload on the host that has this repository; where the bucket keeps versions: "
    "ciuic check --behind-deletions --repair"
)
# Objects of one space that are listed before the rest of it is left out: a page of a store.
_LISTED_OF_A_SPACE: Final = 1000


def find_spaces(objects: Objects) -> dict[str, bool]:
    """Return whether the remote.json of each space is there, by the repository's id.

    A LIST for each thousand objects, or for each space that has more.
    """
    ids: dict[str, bool] = {}
    after: str | None = ""
    while after is not None:
        begun, after = after, None
        # Spaces follow each other whole: their names have one length.
        current, listed = "", 0
        for found in objects.list(REPOSITORIES_PREFIX, after=begun):
            id_ = found.name.split("/")[1]
            current, listed = id_, listed + 1 if id_ == current else 1
            if not _SPACE_END.match(f"/{REPOSITORIES_PREFIX}{id_}"):
                continue
            is_long = listed > _LISTED_OF_A_SPACE
            name = found.name.removeprefix(f"{REPOSITORIES_PREFIX}{id_}/")
            # Of anything else there is nothing to be read.
            if name == REMOTE_JSON or any(
                parse(name) for parse in (parse_log_entry, parse_manifest, parse_pack)
            ):
                ids[id_] = ids.get(id_, False) or name == REMOTE_JSON
            if is_long:
                # Of what follows nothing is listed: `info` is asked in the end.
                ids.setdefault(id_, False)
                # "0" follows "/": behind everything in that directory.
                after = f"{REPOSITORIES_PREFIX}{id_}0"
                break
    # What a listing lacks may be there.
    return {id_: is_listed or objects.info(space_json(id_)) is not None for id_, is_listed in ids.items()}


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
            return slots.unlock(read_remote_id(data), secret, first=_first_slot(), goes_on=goes_on)[1]
        except WrongKey as error:
            failure = error
    assert failure is not None
    raise failure


def opened_remote(
    objects: Objects, data: bytes, master: MasterKey | None, expected_id: bytes | None = None
) -> Remote:
    """Return the remote that the bytes of its remote.json describe.

    Raises:
        DamagedRemote, WrongKey, UnsupportedFormat: as `ciuic.remote.documents.open_remote`.
    """
    opened = open_stored(data, master, expected_id=expected_id)
    return Remote(objects, opened.stored, opened.sealer, opened.identity, master)


def configured_objects(config: RemoteConfig, *, make: bool = False) -> Objects:
    """Return the objects of a configured remote, with a client of their own. No object store is asked yet.

    Args:
        config: The remote's part of the configuration.
        make: Make the directory of a ``file`` URL where it is missing.

    Raises:
        UsageError: the URL or a setting is wrong, or obstore is not installed.
        NoCredentials: the shared files name credentials that cannot be used.
        RemoteUnreachable: a directory is not there.
    """
    return open_objects(config.url, configured_settings(config), make=make)


def configured_settings(config: RemoteConfig) -> StoreSettings:
    """Return what the store must be told beside the URL."""
    return StoreSettings(
        endpoint=config.endpoint or "",
        region=config.region or "",
        storage_class=config.storage_class or "",
        ssh_command=config.ssh_command or "",
        ssh_program=config.ssh_program or "",
    )


def open_configured(
    config: RemoteConfig, objects: Objects, secrets: Sequence[SlotSecret], *, goes_on: GoesOn | None = None
) -> Remote:
    """Open a configured remote as `open_remote` does, and refuse one in clear where encryption is configured.

    Raises:
        WrongKey: no secret fits, or the remote is not encrypted and the configuration does not say so.
    """
    remote = open_remote(objects, secrets, goes_on=goes_on)
    return require_sealed(remote) if config.encryption else remote


def require_sealed(remote: Remote) -> Remote:
    """Return the remote where it is encrypted.

    Raises:
        WrongKey: it is not.
    """
    # An attacker who can write to the bucket could otherwise have everything sent in clear to a host without a key.
    if not remote.stored.sealed:
        raise WrongKey(
            f"the remote at {remote.objects.url} is not encrypted, and the configuration does not say so",
            hint="if it was made so: encryption = false under [remote]",
        )
    return remote


class RepositoryChoice(Enum):
    """Outcome for the repository of a host that joined a remote."""

    MADE = "made"
    """There was none."""
    REPLACED = "replaced"
    """There was one that held nothing, with another identity."""
    SHARES = "shares"
    """It has the identity of the remote already."""
    OWN_IDENTITY = "own-identity"
    """It holds snapshots under an identity of its own, and keeps it."""


def join_repository(path: Path, remote: Remote, *, refuse_foreign: bool = True) -> RepositoryChoice:
    """Have a repository at the path that shares chunks with the remote, if nothing is stored there; durable on return.

    No daemon may use the repository meanwhile.

    Args:
        path: The repository; its parent directories are made.
        remote: Open remote.
        refuse_foreign: As in `Repository.create`.

    Raises:
        Busy: another process writes to the repository.
        NotPermitted: the directory cannot be written.
    """
    choice = RepositoryChoice.MADE
    if Repository.exists(path):
        with Repository.open(path) as repository:
            if shares_chunks(repository, remote):
                return RepositoryChoice.SHARES
        if not unmake_empty(os.path.abspath(path)):
            return RepositoryChoice.OWN_IDENTITY
        choice = RepositoryChoice.REPLACED
    path.parent.mkdir(parents=True, exist_ok=True)
    Repository.create(
        path, block_size=remote.stored.block_size, identity=remote.identity, refuse_foreign=refuse_foreign
    ).close()
    return choice


def shares_chunks(repository: Repository, remote: Remote) -> bool:
    """Return whether chunks of the repository have the ids that they have in the remote."""
    return repository.identity == remote.identity and repository.block_size == remote.stored.block_size
