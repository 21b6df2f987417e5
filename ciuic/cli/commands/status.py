"""``ciuic status``: what the daemon, its roots and the store are doing, and how much work is at risk.

Guarantees: with no daemon the exit code is 5, and what can be read without one (newest snapshot, store) is shown all the
same, because that is when somebody needs it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from ciuic import __version__
from ciuic.cli.shared import times
from ciuic.cli.shared.messages import plural, shown_text
from ciuic.cli.shared.options import FrameCommand
from ciuic.cli.shared.output import Cell, Column, json_option, out, out_json, out_prose, show_table
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, NotPermitted, Unreachable
from ciuic.printable import shown_name
from ciuic.units import human_duration, human_size

if TYPE_CHECKING:
    from ciuic.protocol.control_types import (
        BesideStatus,
        DamageStatus,
        DrillStatus,
        Incident,
        RemoteStatus,
        RootStatus,
        SnapshotState,
        StatusDocument,
        TrainerStatus,
    )
    from ciuic.repository import SnapshotInfo


_WATCH_SECONDS: Final = 1.0
_LABEL_WIDTH: Final = 11
_HEARD: Final = {
    "pressure": "whoever waits for a disk",
    "writes": "whoever writes much",
    "requests": "requests that wait in the overlay",
}


@click.command("status", cls=FrameCommand)
@click.option("--watch", is_flag=True, help="Again every second, until interrupted.")
@json_option
def command(watch: bool, as_json: bool) -> None:
    """Show daemon, roots, snapshots, store and alerts."""
    session = current()
    if watch:
        _watch(session, as_json)
        return
    # A caller who may not ask the daemon may still be allowed to read the repository. The error decides the
    # exit code.
    try:
        document = session.control.status()
    except (Unreachable, NotPermitted) as error:
        _without_daemon(session, error, as_json)
        raise
    _show(session, document, as_json)


def _show(session: Session, document: StatusDocument, as_json: bool) -> None:
    if as_json:
        import msgspec

        out_json(msgspec.to_builtins(document))
    else:
        _print(document)
        _print_lazy_restores(session)


def _print_lazy_restores(session: Session) -> None:
    """Print the lazy restores that are not complete; the daemon knows nothing of them."""
    from ciuic.cli.shared.lazy_restore import incomplete_lines

    for line in incomplete_lines(session):
        _say(f"restore    {line}")


def _watch(session: Session, as_json: bool) -> None:
    """Show the status again and again: redrawn on a terminal, JSON lines with --json. A daemon that restarts is waited for."""
    import json

    import msgspec

    while not session.stdout_gone:
        # Other errors end it: a daemon that is restarted comes back, a missing permission does not.
        try:
            document = session.control.status()
        except Unreachable as error:
            if as_json:
                out(json.dumps({"error": error.message, "hint": error.hint, "code": error.exit_code}))
            else:
                _clear()
                out(f"{times.clock(time.time_ns())}  {error.message}")
        else:
            if as_json:
                out(json.dumps(msgspec.to_builtins(document)))
            else:
                _clear()
                _print(document)
        sys.stdout.flush()
        # What fails from here on must not follow the lines as one more document.
        session.printed_json = True
        time.sleep(_WATCH_SECONDS)


def _clear() -> None:
    # Into a file or pipe one status follows the other.
    if sys.stdout.isatty():
        click.clear()


def _say(text: str, **style: Any) -> None:
    out_prose(text, _LABEL_WIDTH, **style)


def _print(status: StatusDocument) -> None:
    _say(
        f"daemon     {'stopping' if status.stopping else 'running'}, version {status.version}, pid {status.pid}, "
        f"since {times.clock_of(status.since)}"
    )
    if status.version != __version__:
        _say(f"           this command is of version {__version__}", fg="yellow")
    _print_snapshots(status)
    store = status.repository
    if store.exists:
        _say(
            f"store      {shown_text(store.path)}: {human_size(store.size_bytes)} in {plural(store.snapshots, 'snapshot')}, "
            f"{human_size(store.free_bytes)} of {human_size(store.total_bytes)} free"
        )
        if store.reserve_bytes:
            _say(
                f"           captures leave {human_size(store.reserve_bytes)} of it free for others "
                f"({shown_text(store.reserve_reason)})"
            )
        if store.made_apart_from:
            _say(
                f"           made by the daemon without the identity of the remote {shown_text(store.made_apart_from)}: "
                "it shares no chunks with other hosts",
                fg="yellow",
            )
    elif store.missing:
        _say(f"store      {shown_text(store.missing)}", fg="red")
        if store.missing_hint:
            _say(f"           {shown_text(store.missing_hint)}")
    else:
        _say(f"store      {shown_text(store.path) or 'none'}: not made yet")
    _print_damage(status.damage)
    _print_drill(status.drill)
    for remote in status.remotes:
        _say(_remote_line(remote))
    _say(f"beside     {_beside_line(status.beside)}")
    if status.roots:
        out()
        _print_roots(status)
    else:
        _say("roots      none; protect a directory with: ciuic protect PATH")
    for capture in status.captures:
        _say(_capture_line(capture))
    if status.trainers or status.incidents:
        print_trainers(status)
    _print_alerts(status)


def _print_snapshots(status: StatusDocument) -> None:
    if status.repository.missing:
        _say("snapshots  none can be read or taken: the repository is gone", fg="red")
    elif status.last_snapshot is None:
        _say("snapshots  none yet: everything is at risk", fg="yellow")
    else:
        last = status.last_snapshot
        _say(
            f"snapshots  last {last.id}{' (partial)' if last.partial else ''} at {times.clock_of(last.time)}, "
            f"{human_size(last.new_bytes)} new; "
            f"work at risk: {_risk(status.seconds_since_last)}"
        )
    if status.next_snapshot:
        _say(f"           next at {times.clock_of(status.next_snapshot)}")


def _risk(seconds_since_last: float | None) -> str:
    if seconds_since_last is None:
        return "all of a root that has no snapshot yet"
    return f"{human_duration(seconds_since_last)} since last snapshot"


def _next(root: RootStatus) -> str:
    """A time of today alone, as a rule: the column is narrow."""
    return times.clock_of(root.next_snapshot).partition(" ")[2] if root.next_snapshot else "-"


def _print_roots(status: StatusDocument) -> None:
    columns = [
        Column("ROOT", shrink=True),
        Column("DRIVER"),
        Column("STATE"),
        Column("AT RISK", right=True),
        Column("NEXT"),
        Column("DIRTY", right=True),
        Column("UNDO", right=True),
        Column("OPEN", right=True),
        Column("PENDING", right=True),
        Column("TRACKING"),
    ]
    rows = [
        (
            shown_text(root.path),
            f"{root.driver}, passthrough" if root.passthrough else root.driver,
            Cell(root.state, "green" if root.state == "mounted" else "yellow"),
            human_duration(root.seconds_since_last)
            if root.seconds_since_last is not None
            else Cell("all", "yellow"),
            _next(root),
            human_size(root.dirty_bytes),
            human_size(root.undo_bytes),
            str(root.open_files),
            str(len(root.pending)),
            "yes" if root.tracking else "no: next capture compares the whole tree",
        )
        for root in status.roots
    ]
    show_table(columns, rows)
    # An alert names them already: each thing is said once.
    alerted = {alert.root for alert in status.alerts if alert.key.startswith("bypass")}
    for root in status.roots:
        if root.driver_why and not root.passthrough:
            _say(f"{shown_text(root.path)}: driver {root.driver}: {shown_text(root.driver_why)}")
        if root.driver_why and not root.filtered:
            _say(
                f"{shown_text(root.path)}: system calls of the worker are not filtered; ciuic doctor says why"
            )
        if root.error:
            _say(f"{shown_text(root.path)}: {shown_text(root.error)}", fg="red")
        if root.snapshots_dir not in ("off", "mounted"):
            _say(
                f"{shown_text(root.path)}: no snapshots at .snapshots in it: {shown_text(root.snapshots_dir)}"
            )
        for process in root.bypassing if root.path not in alerted else ():
            _say(
                f"{shown_text(root.path)}: process {process.pid} ({shown_text(process.command)}) goes round the "
                f"overlay with {plural(len(process.paths), 'file')} open; restart it to have its changes tracked",
                fg="yellow",
            )
        for mount in root.bypassing_mounts if root.path not in alerted else ():
            owner = f" in the mount namespace of process {mount.pid}" if mount.elsewhere else ""
            _say(
                f"{shown_text(root.path)}: {shown_text(mount.shows)} is reached without passing the overlay at "
                f"{shown_text(mount.place)}{owner}",
                fg="yellow",
            )


def _print_damage(damage: DamageStatus | None) -> None:
    """Print what is known to be damaged."""
    if damage is not None:
        from ciuic.protocol.known_damage import DAMAGE_HINT, damage_words

        _say(f"damage     {damage_words(damage)}", fg="red")
        _say(f"           {DAMAGE_HINT}")


def _print_drill(drill: DrillStatus | None) -> None:
    """Print the last drill of a restore, if there was one or one is due."""
    if drill is None:
        return
    then = f"; next at {times.clock_of(drill.next)}" if drill.next else ""
    if not drill.time:
        _say(f"drill      none yet{then}")
        return
    when = times.clock_of(drill.time)
    if drill.verdict == "good":
        whole = human_duration(drill.estimated_seconds)
        _say(
            f"drill      {when}: exact, {drill.seconds:.0f} s, {plural(drill.files, 'file')}; "
            f"all of it would take about {whole}{then}"
        )
    else:
        _say(f"drill      {when}: {drill.verdict.upper()}: {shown_text(drill.reason)}{then}", fg="red")


def _remote_line(remote: RemoteStatus) -> str:
    text = f"remote     {remote.name}: "
    if remote.problem:
        return f"{text}{shown_text(remote.problem)}; ciuic remote status"
    if not remote.snapshots:
        return f"{text}has everything"
    text += f"behind by {plural(remote.snapshots, 'snapshot')}, about {human_size(remote.size_bytes)}"
    # Zero while only older snapshots wait.
    return f"{text}, {human_duration(remote.seconds)} of work" if remote.seconds else text


def _beside_line(beside: BesideStatus) -> str:
    """Return the line about how captures and upkeep make way for the job."""
    place = (
        f"nice 19 at most, I/O class {beside.io_priority or 'none'}, {beside.slice or 'no slice of systemd'}"
    )
    if beside.min_share >= 1:
        return f"{place}; making way for nobody"
    heard = [words for key, words in _HEARD.items() if key in beside.hears]
    if not heard:
        return f"{place}; nothing to be heard of others here, so making way for nobody"
    text = f"{place}; making way for {', '.join(heard)}; {beside.min_share * 100:.2g}% of the time at least"
    # A daemon of an earlier version sends none.
    if beside.finish_within_seconds:
        text += f", all of it {human_duration(beside.finish_within_seconds)} after a cut"
    return text


def _capture_line(capture: SnapshotState) -> str:
    text = f"capture    {capture.id} {capture.state}"
    if capture.state == "failed":
        return f"{text}: {shown_text(capture.error)}"
    done = capture.progress
    if done is not None and done.bytes_total:
        text += f", {done.bytes_done / done.bytes_total:.0%} of {human_size(done.bytes_total)}"
    if capture.seconds_left is not None:
        text += f", done in about {human_duration(capture.seconds_left)}"
    elif done is not None and done.files_done:
        text += f", {plural(done.files_done, 'name')} so far (how many there are is not known)"
    if done is not None and done.share < 1:
        text += (
            f", slowed down to {done.share * 100:.2g}% of its time: others wait for the disk {done.others_waiting:.0%} "
            f"of theirs and write {human_size(round(done.others_writing))}/s (made way for "
            f"{human_duration(done.paused_seconds)} so far)"
        )
    return text


def _print_alerts(status: StatusDocument) -> None:
    for alert in status.alerts:
        # Each thing is said once: above, with the store.
        if alert.key == "damage" and status.damage is not None:
            continue
        colour = "red" if alert.severity == "problem" else "yellow"
        _say(
            f"{alert.severity:<10} {shown_text(alert.message)} (since {times.clock_of(alert.since)})",
            fg=colour,
        )
        if alert.hint:
            _say(f"           {alert.hint}")


def _without_daemon(session: Session, error: CiuicError, as_json: bool) -> None:
    """Show what is known without a daemon. An unreadable repository must not hide the first error."""
    try:
        facts = _store_facts(session)
    except (CiuicError, OSError):
        facts = {}
    last: SnapshotInfo | None = facts.get("last_snapshot")
    if as_json:
        if last is not None:
            # Imported here: all of the listing, for the keys of one snapshot.
            from ciuic.cli.commands.list import as_document

            facts["last_snapshot"] = as_document(last)
        out_json(
            {"error": error.message, "hint": error.hint, "code": error.exit_code, "daemon": None, **facts}
        )
        return
    _print_lazy_restores(session)
    if facts:
        if last is None:
            _say(f"store      {shown_text(facts['repository']['path'])}: no snapshots yet")
        else:
            age = human_duration(facts["seconds_since_last"])
            _say(f"snapshots  last {last.id} at {times.clock(last.time_ns)}; work at risk: {age}")
            for root in facts["roots"]:
                _say(
                    f"root       {shown_text(root['path'])}: work at risk: {_risk(root['seconds_since_last'])}"
                )
            _say(
                f"store      {shown_text(facts['repository']['path'])}: "
                f"{human_size(facts['repository']['free_bytes'])} free"
            )
        _print_damage(_damage(session))
        _print_drill(_last_drill(session))


def _damage(session: Session) -> DamageStatus | None:
    # As a rule there is no record, and what reads it is not imported.
    if not os.path.lexists(session.repository_dir / "damage"):
        return None
    from ciuic.protocol.known_damage import damage_status, read_damage

    return damage_status(read_damage(session.repository_dir))


def _last_drill(session: Session) -> DrillStatus | None:
    """Return the last drill of a restore from the repository; None if there was none."""
    if not os.path.lexists(session.repository_dir / "drills"):
        return None
    from ciuic.protocol.last_drill import drill_status, read_drills, standing_drill

    found = standing_drill(read_drills(session.repository_dir))
    return None if found is None else drill_status(found)


def _store_facts(session: Session) -> dict[str, Any]:
    import msgspec

    # A safety snapshot has what a restore replaced, and is no answer to what is at risk.
    last = next(iter(session.repository.snapshots.list(limit=1, safety=False)), None)
    drill, damage = _last_drill(session), _damage(session)
    # f_bavail as in df(1) and in the daemon's document, and not what root alone may use.
    space = os.statvfs(session.repository_dir)
    return {
        "last_snapshot": last,
        "seconds_since_last": None if last is None else _age_seconds(session, last),
        "roots": _roots_facts(session),
        "drill": None if drill is None else msgspec.to_builtins(drill),
        "damage": None if damage is None else msgspec.to_builtins(damage),
        "repository": {
            "path": str(session.repository_dir),
            "free_bytes": space.f_bavail * space.f_frsize,
            "total_bytes": space.f_blocks * space.f_frsize,
        },
    }


def _age_seconds(session: Session, snapshot: SnapshotInfo) -> float:
    """Return the age of a snapshot; 0 for one in the future (the clock was put back), as in the daemon's document."""
    return max(0.0, (session.now_ns - snapshot.time_ns) / times.NS)


def _roots_facts(session: Session) -> list[dict[str, Any]]:
    """The age of each configured root's newest snapshot; none where the configuration cannot be read."""
    try:
        paths = [root.path for root in session.config.roots]
    except CiuicError:
        return []
    found = []
    for path in paths:
        newest = session.repository.snapshots.latest(os.fsencode(path))
        age = None if newest is None else _age_seconds(session, newest)
        found.append({"path": str(path), "seconds_since_last": age})
    return found


# The newest; status --json has those that the daemon keeps.
_MAX_INCIDENTS: Final = 5
_COLOURS: Final = {"running": "green", "hung": "red"}


def print_trainers(status: StatusDocument) -> None:
    """Print the lines about trainers, if there are any."""
    if status.trainers:
        _print_table(status.trainers)
    for trainer in status.trainers:
        if trainer.failed_saves:
            failed = plural(trainer.failed_saves, "save has failed", "saves in a row have failed")
            since = times.clock_of(trainer.failing_since)
            reason = shown_text(trainer.save_error)
            out_prose(
                f"saves      {shown_name(trainer.name)}: {failed} since {since}: {reason}", 11, fg="red"
            )
    for incident in status.incidents[:_MAX_INCIDENTS]:
        out_prose(_incident_line(incident), 11, fg="green" if incident.kind == "recovered" else "yellow")


def _print_table(trainers: list[TrainerStatus]) -> None:
    columns = [
        Column("TRAINER", shrink=True),
        Column("PID", right=True),
        Column("USER"),
        Column("STATE"),
        Column("STEP", right=True),
        Column("LAST BEAT"),
        Column("HUNG AFTER", right=True),
    ]
    rows = [
        (
            _name_and_place(trainer),
            str(trainer.pid or "-"),
            shown_text(trainer.user),
            Cell(trainer.state, _COLOURS.get(trainer.state, "yellow")),
            str(trainer.step or "-"),
            times.clock_of(trainer.last_beat) if trainer.last_beat else "-",
            human_duration(trainer.heartbeat_seconds) if trainer.heartbeat_seconds else "never",
        )
        for trainer in trainers
    ]
    out()
    show_table(columns, rows)


def _name_and_place(trainer: TrainerStatus) -> str:
    name = shown_name(trainer.name)
    return f"{name} ({shown_name(trainer.where)})" if trainer.where else name


def _incident_line(incident: Incident) -> str:
    """Return the line of an incident: what happened, and which snapshot there is of it."""
    text = f"incident   {times.clock_of(incident.time)} {shown_name(incident.trainer.name)} {incident.kind}"
    if incident.reason:
        text += f": {shown_text(incident.reason)}"
    if incident.snapshot:
        return f"{text}; emergency snapshot {incident.snapshot}"
    return (
        f"{text}; no emergency snapshot: {shown_text(incident.no_snapshot)}" if incident.no_snapshot else text
    )
