"""Options of `SnapshotManager` that name remotes, as the configuration of remotes has them, and the repository made for them.

Guarantees: a mistake raises one sentence that names it, and nothing has been contacted. The name of a remote
follows from its URL and endpoint: what was recorded of one place is never taken for another.

The remote itself is made as well where there is none yet (`naming_of`). A repository that is made here names chunks as the remote does, so that all hosts of the remote store equal
content once. One that exists already keeps its own names, and has a space of its own in the remote.

Guarantees: an existing repository is opened without contacting anything. A remote is made only where
create-only was proved, and only with a key that was given, or without encryption where that was asked for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from ciuic.config import RemoteConfig, load_config
from ciuic.config.keys import REMOTE_KEYS
from ciuic.config.load import remote_with
from ciuic.errors import CiuicError, NotFound, UsageError, pip_install
from ciuic.remote.access import (
    KeySlots,
    Remote,
    RemoteExists,
    add_slot,
    configured_objects,
    configured_secrets,
    configured_settings,
    init_remote,
    open_remote,
)
from ciuic.remote.errors import DamagedRemote, WrongKey
from ciuic.remote.objects.model import Objects, RemoteRefused, RemoteUnreachable
from ciuic.remote.objects.store_check import prove_create_only
from ciuic.remote.objects.urls import parse_url
from ciuic.remote.sealing.key_slots import SlotSecret
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.repository import Identity
from ciuic.repository.repository import DEFAULT_BLOCK_SIZE
from ciuic.retention import RetentionPolicy
from ciuic.training.logs import log

_KEYS: Final = (
    "url",
    "endpoint",
    "region",
    "ssh_command",
    "ssh_program",
    "bandwidth",
    "encryption",
    "key_file",
    "key_command",
    "storage_class",
    "schedule.interval",
    *(name for name in REMOTE_KEYS if name.startswith("keep.")),
)
"""Keys of a mapping, as in ``[remote]`` (docs/configuration.md); a dot stands for a mapping in it."""
# Names of remotes have 32 characters at most: 8 for the digest, one for the hyphen before it.
_MAX_LABEL_CHARACTERS: Final = 20
_DIGEST_DIGITS: Final = 8
_PACKAGES: Final = ("obstore", "cryptography", "blake3")
_STATE_VARIABLE: Final = "XDG_STATE_HOME"


def remotes_from(value: Any) -> tuple[RemoteConfig, ...]:
    """Return the remotes that the option ``remote`` names.

    Args:
        value: A URL, a mapping with the keys of ``[remote]``, a `RemoteConfig`, several of these, None, or True for the
            remotes that the configuration of this machine names.

    Raises:
        UsageError: A URL or a setting is wrong, a remote is named twice, or the packages are not installed.
        TypeError: ``value`` is none of these.
    """
    if value is None or value is False:
        return ()
    if value is True:
        value = _configured_remotes()
    several = [value] if isinstance(value, (str, Mapping, RemoteConfig)) else value
    if not isinstance(several, Iterable):
        raise TypeError(f"remote must be a URL, a mapping with a URL, or several of these, got {value!r}")
    remotes = tuple(_remote_of(one) for one in several)
    if len({one.name for one in remotes}) < len(remotes):
        raise UsageError(f"each remote must be named once, got {', '.join(one.url for one in remotes)}")
    if remotes:
        # Found and not imported: together they take a tenth of a second, which only the uploader needs to spend.
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise CiuicError(f"a remote needs {', '.join(missing)}, not installed here", hint=pip_install())
    return remotes


def _configured_remotes() -> tuple[RemoteConfig, ...]:
    """Return the remotes of this machine's configuration (CIUIC_CONFIG, or /etc/ciuic/ciuic.toml).

    Raises:
        UsageError: It names none.
        CiuicError: It cannot be read.
    """
    remotes = load_config().remotes
    if not remotes:
        raise UsageError(
            "remote=True means the remotes in the configuration of this machine, which names none",
            hint="ciuic remote init URL, ciuic remote join URL, or remote=URL",
        )
    return remotes


def local_directory(url: str, environ: Mapping[str, str] | None = None) -> Path:
    """Return the local directory of a training whose ``save_dir`` is a URL.

    It is ``$XDG_STATE_HOME/ciuic/trainings/NAME``, with a NAME from the URL; XDG_STATE_HOME is ``~/.local/state``
    unless it is set.
    """
    variables = os.environ if environ is None else environ
    state = variables.get(_STATE_VARIABLE, "")
    # A relative path is to be ignored (XDG Base Directory Specification).
    home = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return home / "ciuic" / "trainings" / _name_of(url, "")


def _remote_of(value: Any) -> RemoteConfig:
    if isinstance(value, RemoteConfig):
        found = value
    elif isinstance(value, (str, Mapping)):
        found = _parsed({"url": value} if isinstance(value, str) else value)
    else:
        raise TypeError(f"a remote must be a URL or a mapping with a URL, got {value!r}")
    url = str(parse_url(found.url))
    # Checks what it is given, without contacting anything.
    configured_settings(found)
    return replace(found, url=url, name=_name_of(url, found.endpoint or ""))


def _parsed(given: Mapping[str, Any]) -> RemoteConfig:
    values: dict[str, Any] = {}
    for name, value in given.items():
        inner = value.items() if isinstance(value, Mapping) else ((None, value),)
        values |= {name if key is None else f"{name}.{key}": one for key, one in inner}
    unknown = [name for name in values if name not in _KEYS]
    if unknown:
        raise UsageError(f"a remote has no key {unknown[0]!r}; there are {', '.join(_KEYS)}")
    if not values.get("url"):
        raise UsageError('a remote must have a URL: {"url": "s3://BUCKET/PREFIX", …}')
    parsed = {}
    for name, value in values.items():
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            # The URL is parsed by the store, which knows more schemes in tests.
            parsed[name] = text if name == "url" else REMOTE_KEYS[name].parse(text)
        except ValueError as error:
            raise UsageError(f"{name} of a remote {error}") from None
    # With the defaults of `[remote]`, also those of its retention.
    return remote_with(parsed, RetentionPolicy())


def _name_of(url: str, endpoint: str) -> str:
    where = parse_url(url)
    last = where.prefix.rsplit("/", 1)[-1] or where.bucket
    label = re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_MAX_LABEL_CHARACTERS].strip("-")
    digest = hashlib.sha256(f"{where}\n{endpoint}".encode()).hexdigest()[:_DIGEST_DIGITS]
    return f"{label}-{digest}" if label else digest


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
