"""``ciuic show`` and ``ciuic cat``: one snapshot's facts, a directory in it as in ``ls -l``, or the content of a file in it.

Guarantees: a file whose content may be later than the cut is marked; so is, as information, one that was open for writing.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import click

from ciuic.cli.shared import pairs, sets, times
from ciuic.cli.shared.contents import as_recorded, children_of, owner_name, roots_below
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import plural, shown, shown_text
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import abandon_stdout, json_option, note, out, out_json, out_prose
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, UsageError
from ciuic.repository.lookup import find
from ciuic.repository.snapshot_sets import sets_of
from ciuic.types import (
    FLAG_MOUNTPOINT,
    FLAG_OPEN_FOR_WRITING,
    TAG_INCOMPLETE,
    TAG_RETAKEN,
    Entry,
    Snapshot,
    is_safety,
    lag_of,
)

if TYPE_CHECKING:
    from ciuic.repository.snapshot_sets import SnapshotSet
    from ciuic.types import RootRecord


_ROOT = Keys(
    "path, files, size_bytes, mode (`tracked`, `full`, `offline`), not_held (number of files; null where an older snapshot does not"
    " record it), session|null, epoch"
)
_SET = Keys("id, name, member, members, snapshots (id by member, of those that are found), whole")
_SNAPSHOT = Keys(
    "id, time, time_ns, host, size_bytes, new_bytes, files, tags, message, parent|null, held, hold_reason, hold_uid, state"
    " (`committed`), is_incomplete, incomplete, partial, retaken, safety, left_out, roots, pair (or null), set (or null)",
    "`show ID`",
    left_out=Keys("path, reason"),
    roots=_ROOT,
    pair=pairs.PAIR,
    set=_SET,
)
_ENTRY = Keys(
    "name, type, mode, uid, gid, size_bytes, mtime, mtime_ns, inode, open_for_writing, not_held, not_held_until (or null), mountpoint,"
    " files? (of a directory), target? (of a symbolic link), device? (of one: its two numbers)"
)
_PATH = Keys("snapshot, path, type, uid, gid, entries", "`show ID PATH`", entries=_ENTRY)

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFSOCK: "socket",
}

_MS = 1_000_000
"""Nanoseconds of a millisecond."""
# The longest label, `not held`, and a blank.
_LABEL_WIDTH = 9
"""Column at which the facts of a snapshot stand."""


@click.command("show", cls=FrameCommand)
@click.argument("snapshot_id", metavar="ID", type=ID)
@click.argument("path", required=False, type=SNAPSHOT_PATH)
@json_option
def show_command(snapshot_id: str, path: bytes | None, as_json: bool) -> None:
    """Show one snapshot or set; with PATH, the directory or file there as it was."""
    session = current()
    store = session.snapshots
    if path is None and (found := sets.set_named(session, snapshot_id)) is not None:
        _show_set(session, found, as_json)
        return
    snapshot = store.load(store.resolve(snapshot_id))
    if path is not None:
        _show_path(session, snapshot, as_recorded(snapshot, path), as_json)
    elif as_json:
        out_json(_facts(session, snapshot))
    else:
        _print_facts(session, snapshot)


def _set_of(session: Session, snapshot: Snapshot) -> SnapshotSet | None:
    """Return the set that a snapshot is of, with what else is here of it; None if it is of none."""
    place = snapshot.set_member
    if place is None:
        return None
    # With --as-host other members are not read, and not told as missing.
    others = [snapshot] if session.as_host is not None else [snapshot, *session.snapshots.load_all()[0]]
    return next(one for one in sets_of(others) if (one.id, one.members) == (place.id, place.members))


def _set_facts(session: Session, snapshot: Snapshot) -> dict[str, Any] | None:
    place, found = snapshot.set_member, _set_of(session, snapshot)
    if place is None or found is None:
        return None
    return _SET.of(
        place, snapshots={member: one.id for member, one in found.found.items()}, whole=found.is_whole
    )


def _show_set(session: Session, found: SnapshotSet, as_json: bool) -> None:
    if as_json:
        out_json(sets.document(found))
        return
    from ciuic.units import human_size

    out(f"set {shown_text(found.name)}", bold=True)
    out(f"id       {found.id}")
    out(f"time     {times.clock(found.newest.time_ns)}")
    out(f"size     {human_size(found.size_bytes)}")
    _print_members(found)
    sets.warn_of_lacking(session, found)


def _print_members(found: SnapshotSet) -> None:
    for member in found.members:
        snapshot = found.found.get(member)
        out(
            f"member   {shown_text(member)}  {'missing here' if snapshot is None else snapshot.id}",
            fg="yellow" if snapshot is None else None,
        )


def _facts(session: Session, snapshot: Snapshot) -> dict[str, Any]:
    # Looked up at each call: neither repository can promise anything for the other.
    half = pairs.looked_up(session, [snapshot]).get(snapshot.id)
    return _SNAPSHOT.of(
        snapshot,
        state="committed",
        is_incomplete=TAG_INCOMPLETE in snapshot.tags,
        incomplete=TAG_INCOMPLETE in snapshot.tags,
        partial=bool(snapshot.left_out),
        retaken=TAG_RETAKEN in snapshot.tags,
        safety=is_safety(snapshot.tags, snapshot.message),
        roots=[_root_facts(root) for root in snapshot.roots],
        pair=pairs.document(snapshot.pair, half),
        set=_set_facts(session, snapshot),
    )


def _root_facts(root: RootRecord) -> dict[str, Any]:
    return _ROOT.of(
        root,
        files=root.entry.total_files + root.links_files,
        size_bytes=root.entry.total_bytes + root.links_bytes,
        # -1: a snapshot of a version that did not mark such files.
        not_held=root.not_held if root.not_held >= 0 else None,
    )


def _print_facts(session: Session, snapshot: Snapshot) -> None:
    from ciuic.units import human_duration, human_size

    age = human_duration((session.now_ns - snapshot.time_ns) / times.NS)
    out(f"snapshot {snapshot.id}", bold=True)
    out_prose(f"time     {times.clock(snapshot.time_ns)} ({age} ago)", _LABEL_WIDTH)
    out(f"host     {shown_text(snapshot.host)}")
    out_prose(
        f"size     {human_size(snapshot.size_bytes)} in {plural(snapshot.files, 'file')}, {human_size(snapshot.new_bytes)} new",
        _LABEL_WIDTH,
    )
    if snapshot.parent:
        out(f"parent   {shown_text(snapshot.parent)}")
    if snapshot.tags:
        out(f"tags     {shown_text(', '.join(snapshot.tags))}")
    if snapshot.message:
        out_prose(f"message  {shown_text(snapshot.message)}", _LABEL_WIDTH)
    if snapshot.held:
        out(f"held     {shown_text(snapshot.hold_reason) or 'yes'}{_held_for(snapshot.hold_uid)}")
    for root in snapshot.roots:
        facts = _root_facts(root)
        how = {
            "tracked": "",
            "full": ", whole tree compared",
            "offline": ", not one instant: taken without an overlay",
        }
        out_prose(
            f"root     {shown(root.path)}  {plural(facts['files'], 'file')}, {human_size(facts['size_bytes'])}{how[root.mode]}",
            _LABEL_WIDTH,
        )
    if snapshot.not_held:
        held_not = plural(snapshot.not_held, "file")
        out_prose(
            f"not held {held_not}: the content may be later than the cut; see: ciuic show ID PATH",
            _LABEL_WIDTH,
            fg="yellow",
        )
    for lacking in snapshot.left_out:
        out_prose(
            f"partial  without {shown(lacking.path)}: {shown_text(lacking.reason)}", _LABEL_WIDTH, fg="yellow"
        )
    if (place := snapshot.set_member) is not None:
        out_prose(
            f"set      {shown_text(place.name)}: {shown_text(place.member)} of {shown_text(', '.join(place.members))} ({place.id})",
            _LABEL_WIDTH,
        )
        if session.as_host is None and (found := _set_of(session, snapshot)) is not None:
            _print_members(found)
    pairs.print_half(snapshot.pair, pairs.looked_up(session, [snapshot]).get(snapshot.id))


def _show_path(session: Session, snapshot: Snapshot, path: bytes, as_json: bool) -> None:
    repository = session.repository_of(snapshot.id)
    # A path above the roots has no entry of its own: it is shown as the directories that lead to them.
    entry = None if roots_below(snapshot, path) else find(repository, snapshot, path).entry
    if entry is not None and not entry.is_dir:
        entries = [entry]
    else:
        entries = list(children_of(repository, snapshot, path))
    if as_json:
        out_json(
            _PATH.of(
                snapshot=snapshot,
                path=path,
                type="directory" if entry is None else _type_name(entry),
                uid=None if entry is None else entry.uid,
                gid=None if entry is None else entry.gid,
                entries=[_entry_facts(child, snapshot) for child in entries],
            )
        )
        return
    _print_entries(entries, path if entry is not None and not entry.is_dir else None)
    later = sum(1 for child in entries if snapshot.may_be_later(child))
    if later:
        note(
            f"{plural(later, 'file')} not held at the cut: the content may be later than the snapshot, or torn"
        )


def _type_name(entry: Entry) -> str:
    return _TYPES.get(stat.S_IFMT(entry.mode), "unknown")


def _entry_facts(entry: Entry, snapshot: Snapshot) -> dict[str, Any]:
    lag_ms = lag_of(entry)
    further: dict[str, object] = {}
    if entry.is_dir:
        further["files"] = entry.total_files
    if stat.S_ISCHR(entry.mode) or stat.S_ISBLK(entry.mode):
        further["device"] = [os.major(entry.rdev), os.minor(entry.rdev)]
    return _ENTRY.of(
        entry,
        type=_type_name(entry),
        size_bytes=entry.total_bytes if entry.is_dir else entry.size_bytes,
        inode=entry.ino,
        open_for_writing=bool(entry.flags & FLAG_OPEN_FOR_WRITING),
        not_held=snapshot.may_be_later(entry),
        not_held_until_ns=None if lag_ms is None else snapshot.time_ns + lag_ms * _MS,
        mountpoint=bool(entry.flags & FLAG_MOUNTPOINT),
        **further,
    )


def _print_entries(entries: list[Entry], full_path: bytes | None) -> None:
    """Columns as in ``ls -l``; a directory's size is that of everything below it."""
    lines = [
        (
            stat.filemode(entry.mode),
            owner_name("pwd", entry.uid),
            owner_name("grp", entry.gid),
            _size(entry),
            times.clock(entry.mtime_ns),
            _name(entry, full_path),
        )
        for entry in entries
    ]
    # Without the names, which come last and are not padded.
    widths = [max((len(line[column]) for line in lines), default=0) for column in range(5)]
    for mode, user, group, size, when, name in lines:
        out(f"{mode} {user:<{widths[1]}} {group:<{widths[2]}} {size:>{widths[3]}} {when} {name}")


def _size(entry: Entry) -> str:
    if stat.S_ISCHR(entry.mode) or stat.S_ISBLK(entry.mode):
        return f"{os.major(entry.rdev)}, {os.minor(entry.rdev)}"
    return str(entry.total_bytes if entry.is_dir else entry.size_bytes)


def _name(entry: Entry, full_path: bytes | None) -> str:
    text = shown(full_path if full_path is not None else entry.name)
    if entry.is_symlink:
        text += f" -> {shown(entry.target)}"
    if entry.flags & FLAG_OPEN_FOR_WRITING:
        text += "  [open for writing]"
    lag_ms = lag_of(entry)
    if lag_ms is not None:
        text += f"  [not held: up to {_lag(lag_ms)} later than the cut]"
    if entry.flags & FLAG_MOUNTPOINT:
        text += "  [another file system, not captured]"
    return text


def _lag(lag_ms: int) -> str:
    from ciuic.units import human_duration

    # Rounded up: it is an upper bound.
    return human_duration(-(-lag_ms // 1000)) if lag_ms >= 1000 else f"{lag_ms} ms"


def _held_for(uid: int | None) -> str:
    return "" if uid is None else f" (for user {uid}; yields to min_free)"


_PIECE_BYTES = 1 << 20


@click.command("cat", cls=FrameCommand)
@click.argument("snapshot_id", metavar="ID", type=ID)
@click.argument("path", type=SNAPSHOT_PATH)
def cat_command(snapshot_id: str, path: bytes) -> None:
    """Print the content of a file as it was in a snapshot.

    Nothing is printed to a terminal if the file is not text: redirect it.
    """
    from ciuic.verdicts.sources import SnapshotFile

    session = current()
    snapshot = session.snapshots.load(session.snapshots.resolve(snapshot_id))
    repository = session.repository_of(snapshot.id)
    at = find(repository, snapshot, as_recorded(snapshot, path))
    if not at.entry.is_file:
        kind = (
            "a directory"
            if at.entry.is_dir
            else "a symbolic link"
            if at.entry.is_symlink
            else "a special file"
        )
        raise UsageError(
            f"{shown(at.path)} was {kind} in {snapshot.id}", hint=f"ciuic show {snapshot.id} {shown(at.path)}"
        )
    source = SnapshotFile(repository, snapshot, at, lambda time_ns: None)
    for offset in range(0, source.size_bytes, _PIECE_BYTES):
        data = source.read(offset, _PIECE_BYTES)
        if not offset:
            _refuse_binary(data)
        if not _write(session, data):
            return


def _refuse_binary(data: bytes) -> None:
    # Bytes that control a terminal could make it run or hide something.
    if sys.stdout.isatty() and any(byte < 32 and byte not in b"\t\n\r" for byte in data[:4096]):
        raise UsageError("the file is not text", hint="redirect it: ciuic cat ID PATH > FILE")


def _write(session: Session, data: bytes) -> bool:
    """Write a part of the file; return False if its reader is gone."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        abandon_stdout(session)
        return False
    except OSError as error:
        abandon_stdout(session)
        raise CiuicError(f"the output could not be written: {error.strerror}") from error
    return True
