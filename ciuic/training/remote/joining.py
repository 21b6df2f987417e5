"""Creation of a repository for a remote, and of the remote itself where there is none yet.

A repository that is made here names chunks as the remote does, so that all hosts of the remote store equal
content once. One that exists already keeps its own names, and has a space of its own in the remote.

Guarantees: an existing repository is opened without contacting anything. A remote is made only where
create-only was proved, and only with a key that was given, or without encryption where that was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Final, NamedTuple

from ciuic.config import RemoteConfig
from ciuic.errors import NotFound, UsageError
from ciuic.remote.access import (
    KeySlots,
    Remote,
    RemoteExists,
    add_slot,
    configured_objects,
    configured_secrets,
    init_remote,
    open_remote,
)
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.objects.model import Objects, RemoteRefused, RemoteUnreachable
from ciuic.remote.objects.store_check import prove_create_only
from ciuic.remote.sealing.key_slots import SlotSecret
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.repository import Identity
from ciuic.repository.repository import DEFAULT_BLOCK_SIZE
from ciuic.training.logs import log

_SLOT: Final = "training"
# Another rank that makes the remote adds its key slot right after.
_OTHERS_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.2


class Naming(NamedTuple):
    """Identity and block size of a new repository."""

    identity: Identity
    block_size: int


def naming_of(remote: RemoteConfig) -> Naming:
    """Return how a new repository for this remote names chunks; make the remote if there is none.

    All ranks of a run may call this at once.

    Raises:
        CiuicError: The remote cannot be reached or opened, or there is none and none may be made.
    """
    try:
        # The directory of a file URL is never made: where its file system is not mounted, a new remote would
        # hide the one to resume from.
        with closing(configured_objects(remote)) as objects:
            opened = _opened(remote, objects)
    except (RemoteUnreachable, RemoteRefused) as error:
        raise error.anew(
            f"cannot make a repository for {remote.url}: {error.message}",
            hint="the local directory is new, so that the remote must say how chunks are named, and what there is "
            "to resume; an existing directory begins without a connection",
        ) from error
    return Naming(opened.identity, opened.stored.block_size)


def _opened(remote: RemoteConfig, objects: Objects) -> Remote:
    secrets = configured_secrets(remote)
    end = time.monotonic() + _OTHERS_SECONDS
    has_slots = False
    while True:
        try:
            return open_remote(objects, secrets)
        except NotFound:
            try:
                return _made(remote, objects, secrets)
            except RemoteExists:
                continue
        except (WrongKey, DamagedRemote):
            if not secrets or time.monotonic() > end or has_slots:
                raise
            # Of a remote without any slot, which counts as damage, another rank is adding the first one. It may have
            # come since the attempt, which is then repeated once.
            has_slots = KeySlots(objects).any_object()
            if not has_slots:
                time.sleep(_POLL_SECONDS)


def _made(remote: RemoteConfig, objects: Objects, secrets: Sequence[SlotSecret]) -> Remote:
    """Make the remote.

    Raises:
        RemoteExists: Another process was first.
        UsageError: There is no key, and encryption was not turned off.
    """
    if remote.encryption and not secrets:
        raise UsageError(
            f"there is no remote at {remote.url} yet, and no key to seal a new one with",
            hint=f"ciuic remote init {remote.url} makes one and prints its recovery key; "
            "or set CIUIC_REMOTE_PASSPHRASE or CIUIC_REMOTE_KEY_FILE",
        )
    if not remote.encryption and secrets:
        raise UsageError(
            f"remote {remote.url} has encryption = false, but a key was given",
            hint="leave out one of them: with the key the new remote would be sealed",
        )
    # Before the first step, and on some stores ten seconds long.
    log.warning("ciuic: there is no remote at %s yet: proving that one can be made there", remote.url)
    prove_create_only(lambda: configured_objects(remote))
    if not remote.encryption:
        made = init_remote(objects, master=None, block_size=DEFAULT_BLOCK_SIZE)
    else:
        made = init_remote(objects, master=MasterKey.generate(), block_size=DEFAULT_BLOCK_SIZE)
        for number, secret in enumerate(secrets):
            add_slot(made, _SLOT if not number else f"{_SLOT}-{number}", secret)
    log.warning(
        "ciuic: made a new remote at %s: there is nothing to resume there. %s", remote.url, _about(made)
    )
    return made


def _about(made: Remote) -> str:
    """Return what the owner of a new remote must know of its key."""
    if made.master is None:
        return "It is not sealed: every reader of the bucket can read the states"
    return (
        "It is sealed with the key that was given, and no other opens it: A LOST KEY IS LOST DATA. "
        f"`ciuic remote keys add --recovery {made.objects.url}` makes a second one, to be kept elsewhere"
    )
