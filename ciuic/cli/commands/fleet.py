"""The group ``ciuic fleet``: all hosts of a remote as one, from any machine that may read it.

Guarantees: nothing is asked of another host, and nothing is written to the remote. ``status`` reads one small object of each host, and
no log and no manifest. What a host says of itself is shown as its claim: limited, on one line, and never as another host's
(`ciuic.remote.host_status`). No repository of this machine is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ciuic.cli.commands import list as list_command
from ciuic.cli.commands import verify as verify_command
from ciuic.cli.commands.remote import targets
from ciuic.cli.shared import drills
from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import plural, shown, shown_text
from ciuic.cli.shared.options import (
    HOST_PATH,
    FrameCommand,
    FrameGroup,
)
from ciuic.cli.shared.output import Cell, Column, json_option, note, out, out_json, show_table
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, Damaged, Unreachable, UsageError
from ciuic.system.privileges import no_core_files
from ciuic.units import human_duration, human_size, parse_duration

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig
    from ciuic.maintenance.verify import VerifyResult
    from ciuic.remote.access import Remote
    from ciuic.remote.host_status import HostProblem, HostStatus, ReadStatus, StatusState, StoredByHost
    from ciuic.remote.objects.model import Objects
    from ciuic.remote.reading.opening import ReadableRemote
    from ciuic.remote.reading.remote_snapshots import RemoteSnapshots
    from ciuic.repository import SnapshotInfo
    from ciuic.types import SnapshotId

_STATE = Keys("snapshot, time, epoch, step")
_BEHIND = Keys("snapshots, size_bytes, seconds")
_HOST = Keys(
    "host|null, reporter, told, told_seconds, problems, ciuic (or null), repository|null, interval_seconds|null, max_lag_seconds|null, behind"
    " (or null), newest|null, newest_stored|null, error (or null), roots|null, trainings|null, last_drill|null",
    "each of the `hosts` of `fleet status`, those with problems first",
    problems=Keys("kind (`forged`, `silent`, `error`, `drill`, `behind`), text"),
    behind=_BEHIND,
    newest=_STATE,
    roots=Keys("path, snapshot, time, verdict|null, reason"),
    trainings=Keys("training, stored, local (as of `newest`)"),
    last_drill=Keys("time, verdict, reason"),
)
_SILENT = Keys("host, snapshots, newest_stored")
_STATUS = Keys(
    "remote, url, time, hosts, without_status, missing (hosts of `--expect`), left_out",
    "`fleet status`",
    hosts=_HOST,
    without_status=_SILENT,
)
_VERIFIED = Keys(
    "host, root, snapshot, time, verdict? (`good`, `damaged`, `failed`, and as of `verify`), error?, hint? (of one that failed)",
    "each of the `verified` of `fleet verify`",
)
# A host may say so much of itself; a line of a table has room for less.
_SHOWN = 120


@click.group("fleet", cls=FrameGroup)
def command() -> None:
    """All hosts of a remote, from any machine that may read it (docs/remote.md)."""
    # What follows has the keys of the remote in memory.
    no_core_files()


_host_option = click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="Only this host; may be given several times."
)


class _Host(NamedTuple):
    """A host that has a status, and what is wrong with it."""

    read: ReadStatus
    name: str
    """Its own name, with the first digits of its key where another one has it as well."""
    problems: list[HostProblem]


@command.command("status", cls=FrameCommand)
@targets.place_argument
@click.option(
    "--silent-after",
    metavar="DURATION",
    help="Age from which a status is silence; default: three times the interval that the host promised.",
)
@click.option(
    "--textfile",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Replace FILE with metrics of all hosts, for node_exporter's textfile collector, and print nothing.",
)
@click.option(
    "--expect",
    multiple=True,
    metavar="HOST",
    help="A host that must have a status; without one it needs a person. May be given several times.",
)
@json_option
def status(
    place: str, silent_after: str | None, textfile: Path | None, expect: tuple[str, ...], as_json: bool
) -> int:
    """Show all hosts of a remote, those that need a person first: silent, late, in error, with a failed drill. Exit 1 if there is one.

    It reads one object of each host and lists the manifests. Hosts without a status, such as those with `status_every = "0"`, are named
    with their newest snapshot: whether they should have one only --expect says. Exit 5 if the remote cannot be read, 4 on damage.
    """
    if textfile is not None and as_json:
        raise click.UsageError("--textfile and --json exclude one another")
    session = current()
    limit = None if silent_after is None else _seconds(silent_after)
    config = targets.find_remote(session.config, place)
    try:
        found, others, left_out = _read(session, config, limit)
    except CiuicError as error:
        if error.exit_code != CiuicError.exit_code:
            raise
        # That is the exit code of a host that needs a person.
        raise Unreachable(error.message, hint=error.hint) from error
    missing = _missing(found, expect)
    if textfile is not None:
        from ciuic.cli.commands.metrics import replace_textfile

        replace_textfile(textfile, metrics(session.now_ns, config.name, found, missing))
        # A timer that writes them has done its work, also beside damage that was told; rules judge what is in them.
        session.exit_code = 0
        return 0
    if as_json:
        out_json(
            _STATUS.of(
                remote=config.name,
                url=config.url,
                time_ns=session.now_ns,
                hosts=[_document(session, host) for host in found],
                without_status=[
                    _SILENT.of(one, host=name, newest_stored_ns=one.newest_ns) for name, one in others.items()
                ],
                missing=missing,
                left_out=left_out,
            )
        )
    else:
        _print(session, found, others, missing, left_out)
    if session.exit_code:
        return session.exit_code
    return CiuicError.exit_code if missing or any(host.problems for host in found) else 0


def _missing(hosts: Iterable[_Host], expected: Iterable[str]) -> list[str]:
    """Return the expected hosts that have no status, in their order."""
    from ciuic.remote.object_names import as_label

    there = {as_label(host.read.status.host) for host in hosts if host.read.status is not None}
    return [name for name in dict.fromkeys(expected) if as_label(name) not in there]


def _seconds(text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.UsageError(f"--silent-after: {error}") from error


def _read(
    session: Session, config: RemoteConfig, silent_after_seconds: int | None
) -> tuple[list[_Host], dict[str, StoredByHost], int]:
    """Return the hosts that have a status, the worst first, the others by their labels, and how many were not read."""
    from ciuic.remote.access import configured_objects, find_spaces, lost_spaces
    from ciuic.remote.host_status import host_names, host_problems, read_statuses, stored_by_host
    from ciuic.remote.object_names import MANIFESTS_PREFIX, as_label
    from ciuic.remote.objects.wrappers import PrefixedObjects

    objects = configured_objects(config)
    try:
        remote = _opened(session, config, objects)
        statuses, left_out = read_statuses(objects, remote.sealer)
        # Hosts whose repositories kept their own identity have spaces of their own.
        found = find_spaces(objects)
        spaces = [
            objects,
            *(PrefixedObjects(objects, f"repositories/{id_}") for id_, is_whole in found.items() if is_whole),
        ]
        stored = stored_by_host(info for space in spaces for info in space.list(MANIFESTS_PREFIX))
    finally:
        objects.close()
    session.say_damaged(lost_spaces(objects, found))
    names = host_names(statuses)
    hosts = [
        _Host(
            read,
            names[read.reporter],
            host_problems(read, now_ns=session.now_ns, silent_after_seconds=silent_after_seconds),
        )
        for read in statuses
    ]
    # What happened last is what a person can still do something about.
    hosts.sort(key=lambda host: (not host.problems, -host.read.told_ns, host.name))
    labels = {as_label(one.status.host) for one in statuses if one.status is not None}
    return hosts, {name: one for name, one in sorted(stored.items()) if name not in labels}, left_out


def _opened(session: Session, config: RemoteConfig, objects: Objects) -> Remote:
    """Open a remote for reading; one in clear, too, that no configuration says to be encrypted, as `ciuic --repo URL list` does."""
    import msgspec

    from ciuic.remote.access import configured_secrets
    from ciuic.remote.documents import is_sealed, read_object
    from ciuic.remote.object_names import REMOTE_JSON

    if (
        config not in session.config.remotes
        and not configured_secrets(config)
        and not is_sealed(read_object(objects, REMOTE_JSON))
    ):
        config = msgspec.structs.replace(config, encryption=False)
    return targets.opened(config, objects)


def _document(session: Session, host: _Host) -> dict[str, Any]:
    read, status = host.read, host.read.status
    facts: dict[str, object] = {"ciuic": None, "behind": None, "error": None}
    if status is not None:
        only_here_ns = status.behind.only_here_ns
        seconds = max(0.0, (session.now_ns - only_here_ns) / 1e9) if only_here_ns else 0.0
        trainings = [
            {"training": one.name, "stored": _state(one.stored), "local": _state(one.local)}
            for one in status.trainings
        ]
        facts = {
            "ciuic": status.ciuic,
            "behind": _BEHIND.of(status.behind, seconds=seconds),
            "error": status.error,
            "trainings": trainings,
            "last_drill": status.drill,
        }
    return _HOST.of(
        read,
        status,
        told_seconds=max(0.0, (session.now_ns - read.told_ns) / 1e9),
        problems=host.problems,
        **facts,
    )


_GAUGES = {
    "told_timestamp_seconds": "Time of what the host says of itself",
    "interval_seconds": "Longest time to the next such report, by its promise; 0: it promises none",
    "newest_stored_timestamp_seconds": "Cut of the newest snapshot of the host on the remote; 0: there is none",
    "behind_snapshots": "Snapshots that wait for the remote",
    "behind_bytes": "Bytes by which these let the packs grow",
    "behind_seconds": "Age of the oldest of them that is newer than all stored ones, when the metrics were written",
}


def metrics(now_ns: int, remote: str, hosts: Iterable[_Host], missing: Iterable[str] = ()) -> str:
    """Return the metrics of all hosts in Prometheus text format (docs/monitoring.md). ``missing``: expected hosts without a status."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    labels = ("remote", "host", "reporter")
    read = Gauge("ciuic_fleet_read_timestamp_seconds", "Time of these metrics", ["remote"], registry=registry)
    problem = Gauge(
        "ciuic_fleet_problem", "1 for each reason to look at a host", [*labels, "kind"], registry=registry
    )
    gauges = {
        name: Gauge(f"ciuic_fleet_{name}", text, labels, registry=registry) for name, text in _GAUGES.items()
    }
    read.labels(remote).set(now_ns / 1e9)
    for name in missing:
        problem.labels(remote, shown_text(name), "", "missing").set(1)
    for host in hosts:
        status = host.read.status
        # What another machine says: on one line.
        values = (remote, shown_text(status.host) if status else "", host.read.reporter)
        for one in host.problems:
            problem.labels(*values, one.kind).set(1)
        gauges["told_timestamp_seconds"].labels(*values).set(host.read.told_ns / 1e9)
        if status is not None:
            behind = status.behind
            late_ns = max(0, now_ns - behind.only_here_ns) if behind.only_here_ns else 0
            gauges["interval_seconds"].labels(*values).set(status.interval_seconds)
            gauges["newest_stored_timestamp_seconds"].labels(*values).set(status.newest_stored_ns / 1e9)
            gauges["behind_snapshots"].labels(*values).set(behind.snapshots)
            gauges["behind_bytes"].labels(*values).set(behind.size_bytes)
            gauges["behind_seconds"].labels(*values).set(late_ns / 1e9)
    return generate_latest(registry).decode()


def _state(state: StatusState | None) -> dict[str, Any] | None:
    return None if state is None else _STATE.of(state)


def _age(session: Session, time_ns: int) -> str:
    return human_duration(max(0.0, (session.now_ns - time_ns) / 1e9)) if time_ns else ""


def _print(
    session: Session,
    hosts: list[_Host],
    others: dict[str, StoredByHost],
    missing: list[str],
    left_out: int,
) -> None:
    from ciuic.remote.object_names import as_label

    if not hosts and not others and not missing:
        note("no host has stored anything on this remote yet")
        return
    columns = [
        Column("HOST", shrink=True),
        Column("TOLD", right=True),
        Column("STORED", right=True),
        Column("BEHIND", right=True),
        Column("STATE", shrink=True),
    ]
    rows: list[tuple[str | Cell, ...]] = [
        (
            Cell(shown_text(name), "bold"),
            "",
            _age(session, others[as_label(name)].newest_ns) if as_label(name) in others else "",
            "",
            Cell("no status, though one is expected", "red"),
        )
        for name in missing
    ]
    rows += [_row(session, host) for host in hosts]
    labels = {as_label(name) for name in missing}
    rows += [
        (shown_text(name), "", _age(session, one.newest_ns), "", Cell("no status", "dim"))
        for name, one in others.items()
        if name not in labels
    ]
    show_table(columns, rows)
    ill = sum(bool(host.problems) for host in hosts)
    well = f"{plural(len(hosts) - ill, 'host')} well"
    ill += len(missing)
    note(f"{plural(ill, 'host')} to look at, {well}" if ill else well)
    _note_versions(hosts)
    if left_out:
        note(f"{left_out} more objects below status/ were not read: somebody may be filling the bucket")


def _note_versions(hosts: list[_Host]) -> None:
    """Say which version of ciuic the hosts run, and which of them run another one than most do."""
    running: dict[str, list[str]] = {}
    for host in hosts:
        if host.read.status is not None and host.read.status.ciuic:
            running.setdefault(shown_text(host.read.status.ciuic), []).append(host.name)
    most, *fewer = sorted(running.items(), key=lambda item: -len(item[1])) or [("", [])]
    others = "".join(f"; {version} on {_short(', '.join(names))}" for version, names in fewer)
    if most[0]:
        note(f"version {most[0]} on {plural(len(most[1]), 'host')}{others}")


def _row(session: Session, host: _Host) -> tuple[str | Cell, ...]:
    told = _age(session, host.read.told_ns)
    status = host.read.status
    name = Cell(shown_text(host.name), "bold")
    state = (
        Cell(_short("; ".join(one.text for one in host.problems)), "red") if host.problems else _well(status)
    )
    if status is None:
        return name, told, "", "", state
    behind = status.behind
    late = f"{behind.snapshots}, {human_size(behind.size_bytes)}" if behind.snapshots else "0"
    return name, told, _age(session, status.newest_stored_ns), late, state


def _well(status: HostStatus | None) -> Cell:
    torn = [root.path for root in (status.roots if status else ()) if root.verdict == "TORN"]
    # The next snapshot may have it whole.
    return Cell(f"newest checkpoint TORN: {_short(torn[0])}", "yellow") if torn else Cell("ok", "green")


def _short(text: str) -> str:
    short = shown_text(text)
    return short if len(short) <= _SHOWN else short[: _SHOWN - 1] + "…"


@command.command("list", cls=FrameCommand)
@targets.place_argument
@click.option("--host", metavar="NAME", help="Only snapshots of this host.")
@click.option("--root", type=HOST_PATH, help="Only snapshots of this root.")
@click.option("-n", "limit", type=click.IntRange(min=0), metavar="N", help="Only the N newest of these.")
@click.option("--sets", "only_sets", is_flag=True, help="The sets of several hosts instead, a line each.")
@json_option
def list_snapshots(
    place: str, host: str | None, root: bytes | None, limit: int | None, only_sets: bool, as_json: bool
) -> None:
    """List the snapshots of all hosts, newest first, as `ciuic --repo URL list` does.

    It reads the logs, and each manifest once: this machine keeps a cache.
    """
    _use(current(), place)
    click.get_current_context().invoke(
        list_command.command, host=host, root=root, limit=limit, only_sets=only_sets, as_json=as_json
    )


def _use(session: Session, place: str) -> None:
    """Have the session read the remote that is meant."""
    if place or session.remote_url is None:
        url = targets.find_remote(session.config, place).url
        session.repo_option, session.remote_option = None, url


class _Newest(NamedTuple):
    """Newest snapshot of a root of a host."""

    host: str
    root: bytes
    info: SnapshotInfo


def _newest(session: Session, hosts: tuple[str, ...]) -> list[_Newest]:
    """Return the newest snapshot of each host and root, by their names.

    Raises:
        NotFound: one of the hosts has no snapshot.
    """
    snapshots = session.remote.snapshots
    origins = _origins(snapshots, hosts)
    origin_of = {id_: name for name, own in origins.items() for id_ in own.entries}
    found: dict[tuple[str, bytes], SnapshotInfo] = {}
    # Newest first.
    for info in snapshots.list(safety=False):
        if info.id in origin_of:
            for root in info.roots:
                found.setdefault((origin_of[info.id], root), info)
    return [_Newest(host, root, info) for (host, root), info in sorted(found.items(), key=lambda one: one[0])]


def _origins(snapshots: RemoteSnapshots, hosts: tuple[str, ...]) -> dict[str, RemoteSnapshots]:
    """Return the snapshots of each repository of these hosts; of all hosts where none is named.

    Raises:
        NotFound: one of the hosts has no snapshot.
    """
    chosen = set().union(*(snapshots.of_host(name).entries for name in hosts))
    return {
        name: own
        for name, own in snapshots.by_origin().items()
        if not hosts or not chosen.isdisjoint(own.entries)
    }


@command.command("verify", cls=FrameCommand)
@targets.place_argument
@_host_option
@click.option("--checksum", is_flag=True, help="Read every byte and compare it with its checksum.")
@json_option
def verify(place: str, hosts: tuple[str, ...], checksum: bool, as_json: bool) -> int:
    """Verify the newest snapshot of each host and root: everything there and, with --checksum, every byte right.

    A line each, and the worst exit code of all: 4 on damage, also where a snapshot cannot be read.
    """
    session = current()
    _use(session, place)
    newest = _newest(session, hosts)
    unreadable = [] if hosts else _unreadable(session)
    if checksum:
        session.remote.read_anew()
    else:
        session.remote.read_manifests_anew()
    results = _verified(session, {one.info.id for one in newest}, checksum)
    if as_json:
        out_json(
            {
                "checksum": checksum,
                "verified": [
                    {
                        **_VERIFIED.of(one, one.info, snapshot=one.info.id),
                        **_result_document(results[one.info.id]),
                    }
                    for one in newest
                ],
                "unreadable": [{"snapshot": path, "reason": reason} for path, reason in unreadable],
            }
        )
    else:
        _print_results(session, newest, results, unreadable)
    codes = [_code(result) for result in results.values()]
    return max(codes + [Damaged.exit_code] * bool(unreadable), default=0)


def _verified(
    session: Session, wanted: set[SnapshotId], checksum: bool
) -> dict[SnapshotId, VerifyResult | CiuicError]:
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.verify import verify_each

    results: dict[SnapshotId, VerifyResult | CiuicError] = {}
    with progress("verify") as reporter:
        for repository in session.repositories:
            ids = wanted.intersection(repository.snapshots.names())
            try:
                for id_, result in verify_each(repository, ids, checksum=checksum):
                    results[id_] = result
                    reporter.step("snapshots", len(results), len(wanted))
            except CiuicError as error:
                # The packs of this repository cannot be listed; the others may be sound.
                results |= dict.fromkeys(ids - results.keys(), error)
    return results


def _unreadable(session: Session) -> list[tuple[str, str]]:
    """Return the snapshots that no listing shows; read again only if the count says that there are some."""
    store = session.snapshots
    if len(store.list(safety=True)) == len(store.names()):
        return []
    return [(bad.path, bad.reason) for bad in store.unreadable()]


def _code(result: VerifyResult | CiuicError) -> int:
    if isinstance(result, CiuicError):
        return result.exit_code
    return Damaged.exit_code if result.damaged else 0


def _result_document(result: VerifyResult | CiuicError) -> dict[str, Any]:
    if isinstance(result, CiuicError):
        return {"verdict": "failed", "error": result.message, "hint": result.hint}
    return {"verdict": "damaged" if result.damaged else "good", **verify_command.as_document(result)}


def _print_results(
    session: Session,
    newest: list[_Newest],
    results: dict[SnapshotId, VerifyResult | CiuicError],
    unreadable: list[tuple[str, str]],
) -> None:
    if not newest and not unreadable:
        note("no snapshots yet")
        return
    columns = [
        Column("HOST", shrink=True),
        Column("ROOT", shrink=True),
        Column("SNAPSHOT"),
        Column("AGE", right=True),
        Column("RESULT", shrink=True),
    ]
    rows = [
        (
            Cell(shown_text(one.host), "bold"),
            shown(one.root),
            shown_text(str(one.info.id)),
            _age(session, one.info.time_ns),
            _result_cell(results[one.info.id]),
        )
        for one in newest
    ]
    if rows:
        show_table(columns, rows)
    for path, reason in unreadable:
        out(f"unreadable {shown_text(path)}: {shown_text(reason)}", fg="red")


def _result_cell(result: VerifyResult | CiuicError) -> Cell:
    if isinstance(result, CiuicError):
        return Cell(_short(f"failed: {result.message}"), "red")
    if result.damaged:
        damage = result.damages[0]
        where = shown(damage.path) if damage.path else damage.file
        return Cell(
            _short(f"{plural(len(result.damages), 'damaged place')}: {where}: {damage.reason}"), "red"
        )
    return Cell("every byte right" if result.checksum else "all there", "green")


@command.command("drill", cls=FrameCommand)
@targets.place_argument
@_host_option
@drills.sample_options
@json_option
def drill(
    place: str,
    hosts: tuple[str, ...],
    sample: str | None,
    seed: int | None,
    scratch: Path | None,
    as_json: bool,
) -> int:
    """Prove that a rescue of each host works: restore a sample of its newest snapshot from the remote, and compare it.

    As `ciuic remote drill` does for one host, through an empty cache; the outcome is printed and noted nowhere. A line each, and the
    worst exit code of all.
    """
    session = current()
    sample_bytes = drills.sample_bytes(sample)
    seed = drills.new_seed() if seed is None else seed
    config = targets.find_remote(session.config, place)
    documents = _drilled(session, config, hosts, scratch, seed, sample_bytes)
    if as_json:
        out_json({"remote": config.name, "url": config.url, "drills": documents})
    elif documents:
        show_table(_DRILL_COLUMNS, [_drill_row(one) for one in documents])
    else:
        note("no snapshots yet")
    verdicts = {one["verdict"] for one in documents}
    if "damaged" in verdicts or session.exit_code:
        return Damaged.exit_code
    return CiuicError.exit_code if "failed" in verdicts else 0


def _drilled(
    session: Session,
    config: RemoteConfig,
    hosts: tuple[str, ...],
    scratch: Path | None,
    seed: int,
    sample_bytes: int,
) -> list[dict[str, Any]]:
    from ciuic.maintenance.drill import scratch_directory
    from ciuic.remote.access import configured_objects
    from ciuic.remote.reading.opening import read_remote

    with scratch_directory(drills.scratch_parent(scratch)) as place:
        objects = configured_objects(config)
        try:
            remote = _opened(session, config, objects)
            with read_remote(remote, cache_root=place / "cache") as opened:
                session.say_damaged(opened.lost_spaces)
                damage = [one.message for one in opened.log_damage]
                return [
                    _drill(session, opened, host, place, seed, sample_bytes)
                    for host in _origins(opened.snapshots, hosts)
                ] + [{"host": "", "verdict": "damaged", "error": text} for text in damage]
        finally:
            objects.close()


def _drill(
    session: Session, opened: ReadableRemote, host: str, place: Path, seed: int, sample_bytes: int
) -> dict[str, Any]:
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.drill import run_drill

    try:
        found = opened.of_host(host).snapshots.list(limit=1, safety=False)
        if not found:
            raise Damaged(f"no snapshot of {host} in the remote can be read")
        snapshot = opened.snapshots.load(found[0].id)
        with progress("drill") as reporter:
            result = run_drill(
                opened.repository_of([snapshot.id]),
                snapshot,
                place,
                seed=seed,
                sample_bytes=sample_bytes,
                patterns=session.checkpoint_patterns,
                progress=lambda done, total: reporter.update(bytes_done=done, bytes_total=total),
            )
    except UsageError:
        raise
    except CiuicError as error:
        verdict = "damaged" if isinstance(error, Damaged) else "failed"
        return {"host": host, "verdict": verdict, "seed": seed, "error": error.message, "hint": error.hint}
    return {**drills.result_document(session, snapshot, result), "host": host}


_DRILL_COLUMNS = [
    Column("HOST", shrink=True),
    Column("SNAPSHOT"),
    Column("RESTORED", right=True),
    Column("ALL", right=True),
    Column("RESULT", shrink=True),
]


def _drill_row(document: dict[str, Any]) -> tuple[str | Cell, ...]:
    name = Cell(shown_text(document["host"]), "bold")
    if "error" in document:
        text = f"{document['verdict']}: {document['error']}"
        return name, "", "", "", Cell(_short(text), "red")
    damages = document["damages"]
    result = (
        Cell(_short(f"damaged: {damages[0]['path']}: {damages[0]['reason']}"), "red")
        if damages
        else Cell("good", "green")
    )
    read = f"{plural(document['files'], 'file')}, {human_size(document['bytes_read'])}"
    return (
        name,
        shown_text(document["snapshot"]),
        read,
        f"about {human_duration(document['estimated_seconds'])}",
        result,
    )
