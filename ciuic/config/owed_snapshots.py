"""Last snapshots that are owed: of roots whose protection was to end with one, while no daemon answered.

A daemon takes them at its start and at a reload, and takes the roots out of the configuration then.

Guarantees: a record outlives the daemon and the machine, and lies beside the configuration, which both sides know. A root that
is wanted again stays in the configuration (`keep_protected`): changes happen under the lock of its editors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ciuic.config.edit import locked, remove_roots
from ciuic.structs import decode_json
from ciuic.system.disk import Disk


class OwedSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that is owed; ``root`` is in the configuration."""

    root: str
    message: str = ""
    tags: list[str] = []
    unprotects: bool = True
    """The protection of the root ends with it."""


def owed_snapshots(file: Path) -> list[OwedSnapshot]:
    """Return what is owed beside a configuration file; a record that cannot be read is none."""
    try:
        return decode_json(_record(file).read_bytes(), list[OwedSnapshot])
    except (OSError, msgspec.DecodeError):
        return []


def owe_snapshot(file: Path, owed: OwedSnapshot) -> None:
    """Record a snapshot as owed; durable on return. OSError."""
    _change(file, lambda known: [*(one for one in known if one != owed), owed])


def keep_protected(file: Path, root: str) -> bool:
    """Have a root stay protected after the snapshots that are owed; return whether it would not have. OSError."""
    ending = [one for one in owed_snapshots(file) if one.root == root and one.unprotects]
    if ending:
        _change(
            file,
            lambda known: [replace(one, unprotects=False) if one in ending else one for one in known],
        )
    return bool(ending)


def settle_snapshot(file: Path, owed: OwedSnapshot) -> bool:
    """Remove a record, and its root from the configuration unless it is wanted again; return whether the root was removed.

    Raises:
        ConfigError: the configuration cannot be edited safely; nothing is changed.
        NotPermitted: it may not be written.
        OSError: the record cannot be removed.
    """
    # The root first: a daemon that is killed in between takes another snapshot, and no root stays for ever.
    removed = owed.unprotects and remove_roots(
        file, [Path(owed.root)], only_if=lambda: owed in owed_snapshots(file)
    )
    kept = replace(owed, unprotects=False)
    _change(file, lambda known: [one for one in known if one not in (owed, kept)])
    return bool(removed)


def _change(file: Path, change: Callable[[list[OwedSnapshot]], list[OwedSnapshot]]) -> None:
    with locked(Path(os.path.realpath(file))):
        Disk().replace_file(_record(file), msgspec.json.encode(change(owed_snapshots(file))))


def _record(file: Path) -> Path:
    file = Path(os.path.realpath(file))
    return file.with_name(f".{file.name}.owed")
