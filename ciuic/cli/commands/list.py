"""``ciuic list``: the snapshots, newest first.

Guarantees: one row or line a committed snapshot, from the catalogue alone; ``--machine-readable`` prints exactly
``id|YYYY-MM-DD HH:MM:SS|size_bytes`` and nothing else. Safety snapshots are shown when they are asked for (``--all``), so that a script
that takes the first line never restores what an earlier restore replaced. A snapshot that was promised and given up is a row with the
reason. A snapshot file that cannot be read is never passed over in silence: stderr names it.

Labels of snapshots on a remote (job, epoch, step, host) stand in the names of manifests, so that snapshots are chosen by them before a
manifest is read.
"""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from ciuic.cli.shared import pairs, sets, times
from ciuic.cli.shared.messages import json_name, plural, shown_text, warn
from ciuic.cli.shared.options import HOST_PATH, FrameCommand, use_configured_remote
from ciuic.cli.shared.output import (
    VERDICT_COLOURS,
    Cell,
    Column,
    json_option,
    note,
    out,
    out_json,
    show_table,
)
from ciuic.cli.shared.session import Session, current
from ciuic.errors import Damaged, UsageError
from ciuic.repository.snapshot_sets import shown_members
from ciuic.types import TAG_INCOMPLETE, TAG_NOT_HELD, TAG_PARTIAL, TAG_RETAKEN, TAG_SAFETY, is_safety

if TYPE_CHECKING:
    from ciuic.cli.shared.output import Column
    from ciuic.repository import SnapshotInfo
    from ciuic.repository.promised import Promise
    from ciuic.verdicts.records import VerdictSummary


_JOB_OF_FILES: Final = "files"
"""Label of snapshots of files (docs/remote-format.md, section 2)."""


class WantedLabels(NamedTuple):
    """Labels by which ``list`` chooses; None: any."""

    job: str | None = None
    epoch: int | None = None
    step: int | None = None
    host: str | None = None

    @property
    def are_set(self) -> bool:
        """True if one of them is given."""
        return any(label is not None for label in self)


def _label_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --job, --epoch, --step and --host."""
    number = click.IntRange(min=0)
    for add in (
        click.option("--host", metavar="NAME", help="Of a remote: only snapshots of this host."),
        click.option("--step", type=number, metavar="N", help="Of a remote: only states of this step."),
        click.option("--epoch", type=number, metavar="N", help="Of a remote: only states of this epoch."),
        click.option(
            "--job", metavar="NAME", help="Of a remote: only states of the training with this name; or files."
        ),
    ):
        command = add(command)
    return command


def _choose_by_labels(session: Session, wanted: WantedLabels) -> None:
    """Have the session read the snapshots with these labels alone.

    Raises:
        UsageError: no remote is read.
        NotFound: no snapshot is of this host.
    """
    if not wanted.are_set:
        return
    if session.remote_url is None:
        raise UsageError(
            "--job, --epoch, --step and --host choose among the snapshots of a remote",
            hint="with --repo URL or --all-hosts; in a repository of this host --root /NAME chooses a training",
        )
    session.narrow_remote(lambda remote: remote.labelled(*wanted))


def _label_document(session: Session, info: SnapshotInfo) -> dict[str, Any]:
    """Return the labels of a snapshot in JSON; None where a snapshot has no such label."""
    name = None if session.remote_url is None else session.remote.snapshots.label(info.id)
    if name is None or name.job == _JOB_OF_FILES:
        return {"job": None, "epoch": None, "step": None}
    return {"job": name.job, "epoch": name.epoch, "step": name.step}


def _label_columns(
    session: Session, infos: Sequence[SnapshotInfo]
) -> tuple[list[Column], dict[str, list[str]]]:
    """Return the columns of labels, and the cells of each snapshot by its id; none where no snapshot is a state's."""
    if session.remote_url is None:
        return [], {}
    labels = {info.id: session.remote.snapshots.label(info.id) for info in infos}
    headers = [Column("HOST", shrink=True)]
    hosts = {info.id: [shown_text(info.host)] for info in infos}
    if all(name is None or name.job == _JOB_OF_FILES for name in labels.values()):
        return headers, {str(id_): cells for id_, cells in hosts.items()}
    cells = {
        str(id_): ["", "", *hosts[id_]]
        if name is None or name.job == _JOB_OF_FILES
        else [name.job, f"{name.epoch}-{name.step}", *hosts[id_]]
        for id_, name in labels.items()
    }
    return [Column("JOB", shrink=True), Column("EPOCH-STEP", right=True), *headers], cells


class _Filter(NamedTuple):
    """Selection of snapshots to list."""

    root: bytes | None
    tag: str | None
    since_ns: int | None
    until_ns: int | None
    limit: int | None
    safety: bool
    """True if safety snapshots are among them."""

    @property
    def is_set(self) -> bool:
        return any(choice is not None for choice in self[:4])


@click.command("list", cls=FrameCommand)
@click.option("--root", type=HOST_PATH, help="Only snapshots of this root.")
@click.option("--tag", help="Only snapshots with this tag.")
@click.option(
    "--since", metavar="TIME", help="Only those taken then or later: a time, or 2d for two days ago."
)
@click.option("--until", metavar="TIME", help="Only those taken then or earlier.")
@click.option("-n", "limit", type=click.IntRange(min=0), metavar="N", help="Only the N newest of these.")
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Also the safety snapshots that restores took; in machine-readable lines a last field marks them.",
)
@click.option(
    "--machine-readable",
    is_flag=True,
    help="One line a snapshot: id|YYYY-MM-DD HH:MM:SS|size_bytes, local time.",
)
@click.option(
    "--pairs",
    "with_pairs",
    is_flag=True,
    help="A fourth field in these lines: the id of the snapshot that belongs to it, if that is there.",
)
@click.option(
    "--all-hosts",
    is_flag=True,
    help="From the configured remote: the snapshots of all hosts. With --repo URL they are shown anyway.",
)
@click.option(
    "--sets",
    "only_sets",
    is_flag=True,
    help="The sets instead, a line each: what `snapshot --set` and trainings on several hosts took at one instant.",
)
@_label_options
@json_option
def command(
    root: bytes | None,
    tag: str | None,
    since: str | None,
    until: str | None,
    limit: int | None,
    show_all: bool,
    machine_readable: bool,
    with_pairs: bool,
    all_hosts: bool,
    only_sets: bool,
    as_json: bool,
    **wanted: Any,
) -> None:
    """List the snapshots, newest first.

    size is what the snapshot shows (logical bytes), new what it added to the repository.
    """
    if machine_readable and as_json:
        raise click.UsageError("--machine-readable and --json exclude one another")
    session = current()
    if all_hosts and session.remote_url is None:
        use_configured_remote(session)
    labels = WantedLabels(**wanted)
    if only_sets and (machine_readable or with_pairs or labels.are_set):
        # Labels would leave out members, and every set would look incomplete.
        raise UsageError(
            "--sets lists sets with all their members: leave out --machine-readable, --pairs, --job, --epoch, --step and --host"
        )
    _choose_by_labels(session, labels)
    asked = _Filter(
        root=root,
        tag=tag,
        since_ns=None if since is None else times.parse_when(since, session.now_ns),
        until_ns=None if until is None else times.parse_when(until, session.now_ns, end_of_period=True),
        limit=limit,
        safety=show_all or tag == TAG_SAFETY,
    )
    if only_sets:
        _sets(session, asked, as_json=as_json)
        return
    store = session.snapshots
    infos = store.list(**asked._asdict())
    if machine_readable:
        _lines(session, infos, with_pairs=with_pairs, marked=show_all)
    elif as_json:
        verdicts = _verdicts(session, infos)
        found = pairs.halves(session, infos)
        damaged, given_up = _damaged(session), _given_up(session)
        out_json(
            {
                "repository": session.place,
                "snapshots": [
                    {
                        **as_document(info),
                        **({"state": "given_up"} if info.id in given_up else {}),
                        **_label_document(session, info),
                        "pair": _pair(found.get(info.id)),
                        "checkpoint": _verdict_document(verdicts.get(info.id)),
                        "damaged": info.id in damaged,
                    }
                    for info in infos
                ],
                "lost": [_lost_document(promise) for promise in _lost(session, asked)],
            }
        )
    else:
        _people(session, infos, asked)
    # An unfiltered list is the whole catalogue, which is not read twice then.
    _warn_of_unreadable(
        session, len(infos if asked.safety and not asked.is_set and limit is None else store.list())
    )


def _sets(session: Session, asked: _Filter, *, as_json: bool) -> None:
    """Print the sets of which a snapshot is selected."""
    from ciuic.units import human_duration, human_size

    found = [
        one
        for one in sets.found_sets(session)
        if any(
            (asked.root is None or asked.root in (root.path for root in snapshot.roots))
            and (asked.tag is None or asked.tag in snapshot.tags)
            and (asked.since_ns is None or snapshot.time_ns >= asked.since_ns)
            and (asked.until_ns is None or snapshot.time_ns <= asked.until_ns)
            for snapshot in one.found.values()
        )
    ][: asked.limit]
    if as_json:
        out_json(
            {
                "repository": session.place,
                "sets": [
                    {
                        **sets.document(one),
                        "time": times.rfc3339(one.newest.time_ns),
                        "time_ns": one.newest.time_ns,
                    }
                    for one in found
                ],
            }
        )
    elif found:
        columns = [
            Column("SET", shrink=True),
            Column("ID"),
            Column("TIME"),
            Column("AGE", right=True),
            Column("MEMBERS", right=True),
            Column("SIZE", right=True),
            Column("STATE", shrink=True),
        ]
        rows = [
            (
                Cell(shown_text(one.name), "bold"),
                one.short_id,
                times.clock(one.newest.time_ns),
                human_duration((session.now_ns - one.newest.time_ns) / times.NS),
                f"{len(one.found)} of {len(one.members)}",
                human_size(one.size_bytes),
                Cell("whole", "green")
                if one.is_whole
                else Cell(f"lacks {shown_text(shown_members(one.lacking))}", "yellow"),
            )
            for one in found
        ]
        show_table(columns, rows)
        if session.remote_url is None and not all(one.is_whole for one in found):
            note("of this repository alone; --all-hosts looks in the remote, which has those of other hosts")
    else:
        note("no sets" + (" match" if asked.is_set else " yet"))
    _warn_of_unreadable(session, len(session.snapshots.list()))


def _lines(session: Session, infos: list[SnapshotInfo], *, with_pairs: bool, marked: bool) -> None:
    """The contract with scripts. ``marked``: a last field tells safety snapshots from others."""
    lines = [f"{info.id}|{times.clock(info.time_ns)}|{info.size_bytes}" for info in infos]
    if with_pairs:
        others = pairs.ids(pairs.halves(session, infos))
        # Fields are only added at the end, and only with options: scripts cut by number.
        lines = [f"{line}|{others.get(info.id, '')}" for line, info in zip(lines, infos, strict=True)]
    if marked:
        marks = [TAG_SAFETY if is_safety(info.tags, info.message) else "" for info in infos]
        lines = [f"{line}|{mark}" for line, mark in zip(lines, marks, strict=True)]
    # At once, because each echo is a write(2). Without snapshots nothing is written, not even a line end:
    # scripts take empty output for no snapshots.
    out("".join(f"{line}\n" for line in lines), newline=False)


def _people(session: Session, infos: list[SnapshotInfo], asked: _Filter) -> None:
    lost = _lost(session, asked)
    if infos or lost:
        # Both kinds count: -n 1 shows the newest of all.
        newest = heapq.nlargest(asked.limit or sys.maxsize, _times(infos) + _times(lost))[-1]
        shown_infos = [info for info in infos if info.time_ns >= newest]
        _table(session, shown_infos, [one for one in lost if one.time_ns >= newest])
    elif asked.is_set or not session.snapshots.names():
        note("no snapshots" + (" match" if asked.is_set else " yet"))
    # With -n the difference would count what the limit left out.
    if asked.safety or asked.limit is not None:
        return
    hidden = len(session.snapshots.list(**asked._replace(safety=True)._asdict())) - len(infos)
    if hidden:
        note(f"{plural(hidden, 'safety snapshot')} not shown: ciuic list --all")


def _times(found: Sequence[SnapshotInfo] | Sequence[Promise]) -> list[int]:
    return [one.time_ns for one in found]


def _lost(session: Session, asked: _Filter) -> list[Promise]:
    """Return the promised snapshots that were given up and are selected."""
    if session.remote_url is not None:
        # Promises are known to the host alone that made them.
        return []
    from ciuic.repository.promised import lost

    # Promises are files beside the catalogue, which selects nothing of them. The names are those of today: a
    # snapshot that was committed by a daemon that was killed before it noted so is not lost.
    found = lost(session.repository_dir, session.repository.snapshots.names())
    chosen = [
        promise
        for promise in found
        if (asked.root is None or os.fsdecode(asked.root) in promise.roots)
        and (asked.tag is None or asked.tag in promise.tags)
        and (asked.since_ns is None or promise.time_ns >= asked.since_ns)
        and (asked.until_ns is None or promise.time_ns <= asked.until_ns)
    ]
    return chosen if asked.limit is None else chosen[: asked.limit]


def _lost_document(promise: Promise) -> dict[str, Any]:
    return {
        "id": promise.id,
        "time": times.rfc3339(promise.time_ns),
        "time_ns": promise.time_ns,
        "state": "lost",
        "reason": promise.reason,
        "lost": times.rfc3339(promise.lost_ns),
        "roots": list(promise.roots),
        "tags": list(promise.tags),
        "message": promise.message,
    }


def as_document(info: SnapshotInfo) -> dict[str, Any]:
    """A snapshot in JSON, here and in other commands' documents."""
    return {
        "id": str(info.id),
        "time": times.rfc3339(info.time_ns),
        "time_ns": info.time_ns,
        "size_bytes": info.size_bytes,
        "new_bytes": info.new_bytes,
        "files": info.files,
        "tags": list(info.tags),
        "message": info.message,
        "state": "committed",
        "is_incomplete": TAG_INCOMPLETE in info.tags,
        # Older name; in the documents of `snapshot` it is a list of what could not be read. Kept for scripts.
        "incomplete": TAG_INCOMPLETE in info.tags,
        "partial": TAG_PARTIAL in info.tags,
        "retaken": TAG_RETAKEN in info.tags,
        "not_held": TAG_NOT_HELD in info.tags,
        "safety": is_safety(info.tags, info.message),
        "held": info.held,
        "hold_reason": info.hold_reason,
        "parent": info.parent or None,
        "set": {"id": info.set_id, "name": info.set_name} if info.set_id else None,
        "host": info.host,
        "roots": [json_name("path", path) for path in info.roots],
    }


def _pair(half: pairs.Half | None) -> dict[str, Any] | None:
    return None if half is None else pairs.document(half.pair, half)


def _verdicts(session: Session, infos: Sequence[SnapshotInfo]) -> dict[str, VerdictSummary]:
    """Return what was stored of the newest checkpoint of each snapshot, by its id."""
    if session.remote_url is not None or not infos:
        return {}
    from ciuic.repository.snapshots import VERDICTS_DIR

    # Many repositories have none, and what reads them loads OpenSSL for its digests (8 ms).
    if not os.path.isdir(f"{session.repository.path}/{VERDICTS_DIR}"):
        return {}
    from ciuic.verdicts.records import VerdictRecords

    records = VerdictRecords(session.repository, patterns=session.checkpoint_patterns)
    here = records.names()
    found = {info.id: records.summary(info.id) for info in infos if info.id in here}
    return {id_: one for id_, one in found.items() if one is not None}


def _verdict_cell(found: VerdictSummary | None) -> Cell | str:
    if found is None:
        return ""
    if not found.is_complete:
        return Cell("UNKNOWN", "yellow")
    state = found.newest.checkpoint.verdict.state if found.newest is not None else ""
    count = found.newest.checkpoint.verdict.not_finite if found.newest is not None else None
    text = f"{state}, {count} not finite" if count else state
    return Cell(text, "yellow" if count and state == "GOOD" else VERDICT_COLOURS[state]) if state else ""


def _verdict_document(found: VerdictSummary | None) -> dict[str, Any] | None:
    """Return the newest checkpoint in JSON; None for a snapshot without one, or not judged yet."""
    if found is None or found.newest is None:
        return None
    checkpoint = found.newest.checkpoint
    return {
        **json_name("path", checkpoint.path),
        "verdict": checkpoint.verdict.state if found.is_complete else "UNKNOWN",
        "reason": checkpoint.verdict.reason if found.is_complete else "a part of the snapshot cannot be read",
        "not_finite": checkpoint.verdict.not_finite,
    }


def _table(session: Session, infos: list[SnapshotInfo], lost: list[Promise]) -> None:
    from ciuic.units import human_duration, human_size

    columns = [
        Column("ID"),
        Column("TIME"),
        Column("AGE", right=True),
        Column("SIZE", right=True),
        Column("NEW", right=True),
        Column("FILES", right=True),
        Column("TAGS", shrink=True),
        Column("STATE"),
    ]
    verdicts = {id_: _verdict_cell(one) for id_, one in _verdicts(session, infos).items()}
    judged = any(verdicts.values())
    if judged:
        columns.append(Column("CHECKPOINT"))
    damaged, given_up = _damaged(session), _given_up(session)
    found = pairs.halves(session, infos)
    if found:
        columns.append(Column("PAIR"))
    of_sets = any(info.set_id for info in infos)
    if of_sets:
        columns.append(Column("SET", shrink=True))
    # In a remote there may be snapshots of many hosts and jobs.
    more, cells = _label_columns(session, infos)
    columns += more
    dated = [
        (
            info.order_ns,
            Cell(str(info.id), "bold"),
            times.clock(info.time_ns),
            human_duration((session.now_ns - info.time_ns) / times.NS),
            human_size(info.size_bytes),
            human_size(info.new_bytes),
            str(info.files),
            shown_text(", ".join(info.tags)),
            _state_cell(info, is_damaged=info.id in damaged, is_given_up=info.id in given_up),
            *([verdicts.get(info.id, "")] if judged else []),
            *([pairs.cell(found.get(info.id))] if found else []),
            *([shown_text(info.set_name)] if of_sets else []),
            *cells.get(info.id, ()),
        )
        for info in infos
    ]
    dated += [
        (
            promise.time_ns,
            Cell(promise.id, "bold"),
            times.clock(promise.time_ns),
            human_duration((session.now_ns - promise.time_ns) / times.NS),
            *("", "", ""),
            shown_text(", ".join(promise.tags)),
            Cell("lost", "red"),
            *([""] if judged else []),
            *([""] if found else []),
            *([""] if of_sets else []),
        )
        for promise in lost
    ]
    # Committed and lost ones together, newest first as ever.
    dated.sort(key=lambda row: row[0], reverse=True)
    show_table(columns, [row[1:] for row in dated])
    # What was lost is in a later snapshot of its roots, if there is one: then its row says enough.
    later = {os.fsdecode(root): info.time_ns for info in reversed(infos) for root in info.roots}
    costly = [one for one in lost if any(later.get(root, 0) < one.time_ns for root in one.roots or ("",))]
    if costly:
        newest = costly[0]
        what = (
            f"{newest.id} was lost"
            if len(costly) == 1
            else (f"{plural(len(costly), 'snapshot')} were lost, the newest ({newest.id})")
        )
        warn(
            f"{what}: {shown_text(newest.reason)}",
            hint="the next snapshot has its changes; list --json has every reason, ciuic forget ID takes one off the list",
        )


def _damaged(session: Session) -> set[str]:
    """Return the ids of the snapshots that are known to be damaged."""
    # As a rule there is no record, and what reads it is not loaded.
    if session.remote_url is not None or not os.path.lexists(session.repository_dir / "damage"):
        return set()
    from ciuic.protocol.known_damage import read_damage, touched_snapshots

    return touched_snapshots(read_damage(session.repository_dir))


def _given_up(session: Session) -> set[str]:
    """Return the snapshots of a remote that logs gave up: shown by --all-claims alone."""
    if not session.all_claims or session.remote_url is None:
        return set()
    return {id_ for id_, entry in session.remote.snapshots.entries.items() if entry.is_given_up}


def _state_cell(info: SnapshotInfo, *, is_damaged: bool, is_given_up: bool) -> Cell:
    """``given up``, ``damaged``, ``committed``, ``held``, ``incomplete``, ``partial``, ``safety``: what a person must know before choosing it."""
    if is_given_up:
        return Cell("given up, held" if info.held else "given up", "yellow")
    if is_damaged:
        lacks = [tag for tag in (TAG_PARTIAL, TAG_INCOMPLETE, TAG_SAFETY) if tag in info.tags]
        return Cell(", ".join(["damaged", *lacks, *(["held"] if info.held else [])]), "red")
    if is_safety(info.tags, info.message):
        return Cell("safety, held" if info.held else "safety", "cyan")
    lacks = [tag for tag in (TAG_PARTIAL, TAG_INCOMPLETE) if tag in info.tags]
    if lacks:
        return Cell(", ".join([*lacks, *(["held"] if info.held else [])]), "yellow")
    return Cell("held", "cyan") if info.held else Cell("committed", "green")


def _warn_of_unreadable(session: Session, listed: int) -> None:
    """Warn of snapshot files that no listing shows. They are read only if the count says that there are some, because it is slow.

    Raises:
        Damaged: none can be read, which must not look like a repository without snapshots.
    """
    store = session.snapshots
    if listed == len(store.names()):
        return
    # Others may have been committed since the listing.
    unreadable = list(store.unreadable())
    for bad in unreadable:
        warn(
            f"snapshot file {shown_text(bad.path)} cannot be read: {shown_text(bad.reason)}",
            hint="it cannot be restored, and nothing is pruned while it is there; see: ciuic check",
        )
    if unreadable and not listed:
        raise Damaged(
            f"none of the {plural(len(unreadable), 'snapshot file')} can be read", hint="ciuic check"
        )
