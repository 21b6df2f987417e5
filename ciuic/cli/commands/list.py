"""``ciuic list``: the snapshots, newest first.

Guarantees: one row or line a committed snapshot, from the catalogue alone; ``--machine-readable`` prints exactly
``id|YYYY-MM-DD HH:MM:SS|size_bytes`` and nothing else. Safety snapshots are shown when they are asked for (``--all``), so that a script
that takes the first line never restores what an earlier restore replaced. A snapshot that was promised and given up is a row with the
reason. A snapshot file that cannot be read is never passed over in silence: stderr names it.

Labels of snapshots on a remote (job, epoch, step, host) stand in the names of manifests, so that snapshots are chosen by them before a
manifest is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from ciuic.cli.shared import pairs, times
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import plural, shown_text, warn
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
from ciuic.types import TAG_INCOMPLETE, TAG_NOT_HELD, TAG_PARTIAL, TAG_RETAKEN, TAG_SAFETY, is_safety

if TYPE_CHECKING:
    from ciuic.remote.object_names import ManifestName
    from ciuic.repository import SnapshotInfo
    from ciuic.repository.promised import Promise
    from ciuic.verdicts.records import VerdictSummary


_KEYS: Final = (
    "id, time, time_ns, size_bytes, new_bytes, files, tags, message, state (`committed`; with `--all-claims` also `given_up`),"
    " is_incomplete, incomplete, partial, retaken, not_held, safety, held, hold_reason, parent|null, set (`id`, `name`, or null), host,"
    " roots (each `path`)"
)
_CHECKPOINT: Final = Keys("path, verdict, reason, not_finite (numbers, or null: not all were looked at)")
_SNAPSHOT: Final = Keys(_KEYS)
_LISTED: Final = Keys(
    f"{_KEYS}, job, epoch, step (of training states on a remote; else null), pair (or null), checkpoint (the newest one, or null),"
    " damaged ([known](restore.md#known-damage) to be)",
    "each of the `snapshots` of `list`",
    pair=pairs.PAIR,
    checkpoint=_CHECKPOINT,
)
_LOST: Final = Keys(
    "id, time, time_ns, state (`lost`), reason, lost (time of the failure), roots, tags, message",
    "each of the `lost` of `list`",
)
_SET_TIME: Final = Keys(
    "time, time_ns", "each of the `sets` of `list --sets`, beside the keys of `show set:NAME`"
)
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
        out_json(
            {
                "repository": session.place,
                "snapshots": [line.document() for line in _described(session, infos)],
                "lost": [_LOST.of(promise, state="lost") for promise in _lost(session, asked)],
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
    from ciuic.cli.shared import sets
    from ciuic.repository.snapshot_sets import shown_members
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
                "sets": [{**sets.document(one), **_SET_TIME.of(time_ns=one.newest.time_ns)} for one in found],
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
        newest = sorted(_times(infos) + _times(lost), reverse=True)[: asked.limit or sys.maxsize][-1]
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


def as_document(info: SnapshotInfo) -> dict[str, Any]:
    """A snapshot in JSON, here and in other commands' documents."""
    return _SNAPSHOT.of(info, **_facts(info))


def _facts(info: SnapshotInfo) -> dict[str, object]:
    return {
        "state": "committed",
        "is_incomplete": TAG_INCOMPLETE in info.tags,
        # Older name; in the documents of `snapshot` it is a list of what could not be read. Kept for scripts.
        "incomplete": TAG_INCOMPLETE in info.tags,
        "partial": TAG_PARTIAL in info.tags,
        "retaken": TAG_RETAKEN in info.tags,
        "not_held": TAG_NOT_HELD in info.tags,
        "safety": is_safety(info.tags, info.message),
        "set": {"id": info.set_id, "name": info.set_name} if info.set_id else None,
    }


class _Line(msgspec.Struct, frozen=True):
    """A snapshot, or a promise that was not kept, with what is known of it beside the catalogue."""

    record: SnapshotInfo | Promise
    info: SnapshotInfo | None = None
    """The snapshot; None for a promise."""
    verdict: VerdictSummary | None = None
    half: pairs.Half | None = None
    label: ManifestName | None = None
    """Labels of a state of a training on a remote."""
    is_damaged: bool = False
    is_given_up: bool = False

    @property
    def order_ns(self) -> int:
        """Place in the order of snapshots."""
        return self.record.time_ns if self.info is None else self.info.order_ns

    def document(self) -> dict[str, Any]:
        """Return the snapshot in JSON."""
        assert self.info is not None
        label = {"job": None, "epoch": None, "step": None} if self.label is None else {}
        facts = {**_facts(self.info), **({"state": "given_up"} if self.is_given_up else {}), **label}
        return _LISTED.of(
            self.info,
            self.label,
            pair=None if self.half is None else pairs.document(self.half.pair, self.half),
            checkpoint=_verdict_document(self.verdict),
            damaged=self.is_damaged,
            **facts,
        )


def _described(session: Session, infos: Sequence[SnapshotInfo]) -> list[_Line]:
    verdicts = _verdicts(session, infos)
    found = pairs.halves(session, infos)
    damaged, given_up = _damaged(session), _given_up(session)
    return [
        _Line(
            info,
            info,
            verdicts.get(info.id),
            found.get(info.id),
            _label(session, info),
            info.id in damaged,
            info.id in given_up,
        )
        for info in infos
    ]


def _label(session: Session, info: SnapshotInfo) -> ManifestName | None:
    name = None if session.remote_url is None else session.remote.snapshots.label(info.id)
    return None if name is None or name.job == _JOB_OF_FILES else name


class _ListColumn(msgspec.Struct, frozen=True):
    """A column of the table."""

    look: Column
    cell: Callable[[_Line], Cell | str]
    is_rare: bool = False
    """True if it is shown only where a line has something there."""


def _columns(session: Session) -> list[_ListColumn]:
    """Return the columns; what is in JSON under the same name is a key of `_LISTED`."""
    from ciuic.units import human_duration, human_size

    def of_info(text: Callable[[SnapshotInfo], Cell | str]) -> Callable[[_Line], Cell | str]:
        return lambda line: "" if line.info is None else text(line.info)

    def of_label(text: Callable[[ManifestName], str]) -> Callable[[_Line], Cell | str]:
        return lambda line: "" if line.label is None else text(line.label)

    def age(line: _Line) -> str:
        return human_duration((session.now_ns - line.record.time_ns) / times.NS)

    def host(info: SnapshotInfo) -> str:
        return "" if session.remote_url is None else shown_text(info.host)

    return [
        _ListColumn(Column("ID"), lambda line: Cell(str(line.record.id), "bold")),
        _ListColumn(Column("TIME"), lambda line: times.clock(line.record.time_ns)),
        _ListColumn(Column("AGE", right=True), age),
        _ListColumn(Column("SIZE", right=True), of_info(lambda info: human_size(info.size_bytes))),
        _ListColumn(Column("NEW", right=True), of_info(lambda info: human_size(info.new_bytes))),
        _ListColumn(Column("FILES", right=True), of_info(lambda info: str(info.files))),
        _ListColumn(Column("TAGS", shrink=True), lambda line: shown_text(", ".join(line.record.tags))),
        _ListColumn(Column("STATE"), _state_cell),
        _ListColumn(Column("CHECKPOINT"), lambda line: _verdict_cell(line.verdict), is_rare=True),
        _ListColumn(Column("PAIR"), lambda line: pairs.cell(line.half), is_rare=True),
        _ListColumn(
            Column("SET", shrink=True), of_info(lambda info: shown_text(info.set_name)), is_rare=True
        ),
        # In a remote there may be snapshots of many hosts and jobs.
        _ListColumn(Column("JOB", shrink=True), of_label(lambda label: label.job), is_rare=True),
        _ListColumn(
            Column("EPOCH-STEP", right=True),
            of_label(lambda label: f"{label.epoch}-{label.step}"),
            is_rare=True,
        ),
        _ListColumn(Column("HOST", shrink=True), of_info(host), is_rare=True),
    ]


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
    unknown = {"verdict": "UNKNOWN", "reason": "a part of the snapshot cannot be read"}
    return _CHECKPOINT.of(
        checkpoint,
        checkpoint.verdict,
        **({"verdict": checkpoint.verdict.state} if found.is_complete else unknown),
    )


def _table(session: Session, infos: Sequence[SnapshotInfo], lost: Sequence[Promise]) -> None:
    lines = [*_described(session, infos), *(_Line(promise) for promise in lost)]
    # Committed and lost ones together, newest first as ever.
    lines.sort(key=lambda line: line.order_ns, reverse=True)
    cells = [(column, [column.cell(line) for line in lines]) for column in _columns(session)]
    shown = [(column, texts) for column, texts in cells if not column.is_rare or any(texts)]
    show_table([column.look for column, _ in shown], list(zip(*(texts for _, texts in shown), strict=True)))
    _warn_of_lost(infos, lost)


def _warn_of_lost(infos: Sequence[SnapshotInfo], lost: Sequence[Promise]) -> None:
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


def _state_cell(line: _Line) -> Cell:
    """``lost``, ``given up``, ``damaged``, ``committed``, ``held``, ``incomplete``, ``partial``, ``safety``: what a person must know before choosing it."""
    info = line.info
    if info is None:
        return Cell("lost", "red")
    if line.is_given_up:
        return Cell("given up, held" if info.held else "given up", "yellow")
    if line.is_damaged:
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
