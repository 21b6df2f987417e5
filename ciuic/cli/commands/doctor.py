"""``ciuic doctor``: what a careful operator would look at, looked at.

Guarantees: nothing is changed; one check that fails itself is a finding and does not stop the others; exit code 0 unless
there is a problem (1).

With ``--recovery`` it is the checklist of docs/restore.md, line by line, on what is known here: stores are asked for their key slots,
and whether they still are what this host left; everything else is read from the repository and the records of this host. A line that
cannot be looked at is a warning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ciuic.cli.probes import Finding, NoAnswer, Probes, not_looked_at, ok, problem, warning
from ciuic.cli.shared.messages import plural, shown_text
from ciuic.cli.shared.options import HOST_PATH, FrameCommand
from ciuic.cli.shared.output import json_option, out, out_json, out_prose, wrapped
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, UsageError
from ciuic.units import human_duration, human_size

if TYPE_CHECKING:
    from ciuic.cli.shared.systemd import Systemd
    from ciuic.config import Config, RemoteConfig
    from ciuic.protocol.control_types import StatusDocument
    from ciuic.protocol.last_drill import LastDrill
    from ciuic.repository import Repository
    from ciuic.retention import RetentionPolicy
    from ciuic.system.mountinfo import Mount

_NS: Final = 10**9
_DAY_SECONDS: Final = 86_400
_MIN_REACH_SECONDS: Final = 3 * _DAY_SECONDS
"""A mistake of a Friday evening is found on Monday."""
_MAX_DRILL_SECONDS: Final = 35 * _DAY_SECONDS
"""Where no interval is configured: the timer's month, and some days."""
_MAX_LAG_SECONDS: Final = _DAY_SECONDS


def snapshots_are_young(repository: Repository, config: Config, now_ns: int) -> Iterator[Finding]:
    """Every root has a snapshot that is younger than two intervals."""
    limit_seconds = 2 * config.schedule.interval_seconds
    for root in config.roots:
        place = shown_text(str(root.path))
        newest = repository.snapshots.latest(os.fsencode(root.path))
        if newest is None:
            yield problem("recovery: work at risk", f"{place} is in no snapshot", "ciuic snapshot --wait")
            continue
        age_seconds = max(0.0, (now_ns - newest.time_ns) / _NS)
        text = f"{place} would come back as of {human_duration(age_seconds)} ago ({newest.id})"
        if age_seconds > limit_seconds:
            yield problem("recovery: work at risk", text, "ciuic status says why there is no younger one")
        else:
            yield ok("recovery: work at risk", text)
    if not config.roots:
        yield problem("recovery: work at risk", "no directory is protected", "ciuic protect PATH")


def reach_seconds(policy: RetentionPolicy) -> int:
    """Return how far back the rules reach on a host that takes snapshots all the time."""
    return max(
        policy.keep_within_seconds,
        policy.keep_hourly * 3600,
        policy.keep_daily * _DAY_SECONDS,
        policy.keep_weekly * 7 * _DAY_SECONDS,
        policy.keep_monthly * 30 * _DAY_SECONDS,
        policy.keep_yearly * 365 * _DAY_SECONDS,
    )


def retention_reaches_back(config: Config) -> Iterator[Finding]:
    """Snapshots are kept until a mistake is found."""
    reach = max(reach_seconds(config.retention), *(reach_seconds(one.keep) for one in config.remotes), 0)
    text = f"a mistake can be undone for {human_duration(reach)}"
    if reach < _MIN_REACH_SECONDS:
        yield warning(
            "recovery: retention",
            f"{text}, and one of a Friday evening is found on Monday",
            '[retention] keep_within = "7d", or keep_daily = 14',
        )
    else:
        yield ok("recovery: retention", text)


def nothing_is_damaged(repository: Path) -> Iterator[Finding]:
    """No damage is known that would be met by a restore."""
    from ciuic.protocol.known_damage import DAMAGE_HINT, damage_status, damage_words, read_damage

    damage = damage_status(read_damage(repository))
    if damage is None:
        yield ok("recovery: damage", "none is known")
    else:
        yield problem("recovery: damage", damage_words(damage), DAMAGE_HINT)


def last_drill_is_good(
    drills: Sequence[LastDrill], every_seconds: int | None, now_ns: int
) -> Iterator[Finding]:
    """A restore from the repository was tried lately, and was exact."""
    from ciuic.protocol.last_drill import standing_drill

    yield _drilled(
        "recovery: drill", standing_drill(drills), every_seconds, now_ns, "ciuic drill", "a restore"
    )


def _drilled(
    check: str, drill: LastDrill | None, every_seconds: int | None, now_ns: int, remedy: str, what: str
) -> Finding:
    if drill is None:
        return warning(check, f"{what} was never tried", remedy)
    age_seconds = max(0.0, (now_ns - drill.time_ns) / _NS)
    ago = f"{human_duration(age_seconds)} ago"
    if not drill.is_good:
        return problem(
            check, f"{what} was tried {ago}, and {drill.verdict}: {shown_text(drill.reason)}", remedy
        )
    if age_seconds > max(_MAX_DRILL_SECONDS, 2 * (every_seconds or 0)):
        return warning(check, f"{what} was last tried {ago}", remedy)
    return ok(
        check,
        f"{what} was exact {ago}: {plural(drill.files, 'file')}; all of it would take about "
        f"{human_duration(drill.estimated_seconds)}",
    )


def there_is_another_place(config: Config) -> Iterator[Finding]:
    """Snapshots are on another machine as well."""
    if not config.remotes:
        yield warning(
            "recovery: remote",
            "there is no remote: everything is lost with this host",
            "ciuic remote init URL",
        )


def remote_has_it(repository: Repository, remote: RemoteConfig, now_ns: int) -> Iterator[Finding]:
    """The remote has the newest snapshots, the upload waits for nothing, and a rescue was tried."""
    from ciuic.protocol.last_drill import read_last_drill
    from ciuic.protocol.stored_remotely import remote_lag, upload_state_dir
    from ciuic.remote.remote_look import looks
    from ciuic.remote.upload_status import read_status

    check = f"recovery: remote {remote.name}"
    look = looks([remote], repository, away=False).get(remote.name, "")
    lag = remote_lag(remote, repository.id, repository.snapshots.list(), now_ns=now_ns, look=look)
    limit_seconds = remote.max_lag_seconds or _MAX_LAG_SECONDS
    upload = read_status(remote.name, upload_state_dir())
    if lag.flaw:
        yield problem(check, lag.flaw, "ciuic remote status")
    elif lag.seconds > limit_seconds:
        yield problem(
            check,
            f"it lacks {human_duration(lag.seconds)} of work, {plural(lag.snapshots, 'snapshot')}",
            "ciuic remote status says what it waits for",
        )
    elif upload is not None and upload.waits_for:
        yield warning(check, f"nothing is sent: {shown_text(upload.waits_for)}", "ciuic remote status")
    else:
        lacks = f"lacks {human_duration(lag.seconds)} of work" if lag.snapshots else "has everything"
        yield ok(check, f"it {lacks}; {plural(lag.stored, 'snapshot')} of this repository there")
    yield _drilled(
        f"recovery: drill {remote.name}",
        read_last_drill(remote.name),
        None,
        now_ns,
        f"ciuic remote drill {remote.name}",
        "a rescue",
    )


def key_is_elsewhere(remote: RemoteConfig) -> Iterator[Finding]:
    """The remote can be reached, and opened without any file of this host."""
    from ciuic.remote.access import KeySlots, configured_objects

    check = f"recovery: key {remote.name}"
    objects = configured_objects(remote)
    try:
        slots = KeySlots(objects).all()
    finally:
        objects.close()
    if not slots:
        if remote.encryption:
            yield problem(check, "the remote has no key slot that can be read", "ciuic remote keys list")
        else:
            yield ok(check, "the remote is not encrypted, and opens without a key")
        return
    # A file is of one host, and what a command prints may be; these two a person has.
    kinds = sorted({one.kind for one in slots if one.kind in ("recovery", "passphrase")})
    if kinds:
        yield ok(
            check,
            f"the remote answers, and opens without this host by: {', '.join(kinds)} (find it now, not then)",
        )
    else:
        yield problem(
            check,
            f"only {plural(len(slots), 'key file or command', 'key files or commands')} of hosts open the remote: lost with them, so are the data",
            f"ciuic remote keys add --recovery {remote.name}, and write it down somewhere else",
        )


def restore_has_room(repository: Repository, config: Config, probes: Probes) -> Iterator[Finding]:
    """Each root fits beside what is there now."""
    for root in config.roots:
        place = shown_text(str(root.path))
        newest = repository.snapshots.latest(os.fsencode(root.path))
        if newest is None:
            continue
        snapshot = repository.snapshots.load(newest.id)
        record = next(one for one in snapshot.roots if one.path == os.fsencode(root.path))
        size_bytes = record.entry.total_bytes + record.links_bytes
        try:
            yield from probes.findings(root.path, partial(_room, root.path, place, size_bytes))
        except NoAnswer as error:
            yield not_looked_at("recovery: room", error)


def _room(path: Path, place: str, size_bytes: int) -> Iterator[Finding]:
    from ciuic.system.disk_space import available_bytes

    free_bytes = available_bytes(path)
    text = f"{place} has {human_size(size_bytes)} in its newest snapshot, and its disk {human_size(free_bytes)} free"
    if free_bytes < size_bytes:
        yield warning(
            "recovery: room",
            f"{text}: it can be restored in place, and not beside what is there",
            "know another disk, for ciuic restore -d",
        )
        return
    yield ok("recovery: room", text)


_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


@click.command("doctor", cls=FrameCommand)
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=HOST_PATH)
@click.option(
    "--recovery",
    is_flag=True,
    help="Go through the recovery checklist (docs/restore.md) instead: what would be lost today, and is it proved?",
)
@json_option
def command(paths: tuple[bytes, ...], recovery: bool, as_json: bool) -> int:
    """Look at everything that snapshots depend on; with PATHs, say whether they are protected."""
    if recovery and paths:
        raise UsageError("--recovery goes with no PATH")
    findings = []
    # Printed one by one: should a check hang, the lines before it say where.
    for finding in examine_recovery(current()) if recovery else examine(current(), paths):
        findings.append(finding)
        if not as_json:
            _say(finding)
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        out_json({"problems": problems, "warnings": warnings, "findings": [f._asdict() for f in findings]})
    else:
        out(f"{plural(problems, 'problem')}, {plural(warnings, 'warning')}")
    return 1 if problems else 0


def _say(finding: Finding) -> None:
    label = f"{finding.level:<8}"
    lines = wrapped(f"{label}{finding.check}: {finding.message}", len(label))
    out(label, newline=False, fg=_COLOURS[finding.level])
    out("\n".join(lines).removeprefix(label))
    if finding.remedy:
        out_prose(f"        → {finding.remedy}", 10)


def examine(session: Session, paths: tuple[bytes, ...]) -> Iterator[Finding]:
    """All findings, in the order of how much depends on them."""
    from ciuic.cli import doctor_checks as machine
    from ciuic.system import mountinfo

    probes = Probes()
    if os.geteuid() != 0:
        yield warning(
            "user", "not run as root: other users' processes and files are not seen", "sudo ciuic doctor"
        )
    release = os.uname().release
    yield from _safely("kernel", lambda: machine.kernel(release))
    yield from _safely("fuse", machine.fuse)
    try:
        config = session.config
    except CiuicError as error:
        # All checks below ask about what the configuration names.
        yield problem("configuration", error.message, error.hint or "ciuic config check")
        return
    yield ok(
        "configuration", shown_text(str(config.file)) if config.file else "no file: the defaults are in force"
    )
    # Asked before its findings have their turn: for mounted roots the daemon knows the driver and the reason
    # better.
    from ciuic.cli.shared.systemd import directories_of

    status, findings = _daemon(session)
    wanted = [(str(root.path), root.driver) for root in config.roots]
    served = {
        root.path: (f"{root.driver}, passthrough" if root.passthrough else root.driver, root.driver_why)
        for root in (status.roots if status is not None else ())
        if root.driver_why
    }
    yield from _safely("driver", lambda: machine.driver(wanted, release, served, probes))
    unfiltered = [
        root.path
        for root in (status.roots if status is not None else ())
        if root.driver_why and not root.filtered
    ]
    yield from _safely("system calls", lambda: machine.system_calls(unfiltered))
    yield from findings
    yield from _safely(
        "service",
        lambda: machine.systemd_unit(
            _systemd(), daemon_answers=status is not None, places=directories_of(config.remotes)
        ),
    )
    yield from _places(session, config, paths, mountinfo.read(), status, probes)
    if config.remotes:
        yield from _safely("libraries", machine.libraries)
    yield from _safely("io pressure", machine.pressure)
    yield from _safely("clock", machine.clock)


def examine_recovery(session: Session) -> Iterator[Finding]:
    """Tick the recovery checklist, in its order."""
    from ciuic.protocol.last_drill import read_drills

    try:
        config = session.config
    except CiuicError as error:
        yield problem("configuration", error.message, error.hint or "ciuic config check")
        return
    now_ns = session.now_ns
    try:
        repository = session.repository
    except CiuicError as error:
        yield problem("recovery: repository", error.message, error.hint or "ciuic check")
        return
    yield from _safely("recovery: work at risk", lambda: snapshots_are_young(repository, config, now_ns))
    yield from retention_reaches_back(config)
    yield from nothing_is_damaged(session.repository_dir)
    drills = read_drills(session.repository_dir)
    yield from last_drill_is_good(drills, config.drill.every_seconds, now_ns)
    yield from there_is_another_place(config)
    for remote in config.remotes:
        yield from _safely(
            f"recovery: remote {remote.name}",
            partial(remote_has_it, repository, remote, now_ns),
        )
        yield from _safely(f"recovery: key {remote.name}", partial(key_is_elsewhere, remote))
    probes = Probes()
    yield from _safely("recovery: room", lambda: restore_has_room(repository, config, probes))


def _places(
    session: Session,
    config: Config,
    paths: tuple[bytes, ...],
    mounts: list[Mount],
    status: StatusDocument | None,
    probes: Probes,
) -> Iterator[Finding]:
    from ciuic.cli import doctor_checks as machine
    from ciuic.cli import doctor_checks as places

    # A running daemon looks for such processes itself, and its alerts are findings already.
    yield from _safely(
        "roots", lambda: places.roots(config, mounts, look_for_bypass=status is None, probes=probes)
    )
    try:
        repository = session.repository_dir
    except CiuicError as error:
        yield problem("repository", error.message, error.hint)
    else:
        yield from _safely(
            "owners", lambda: places.owners(config, repository, trusted=session.trusts_repository)
        )
        yield from _safely("repository", lambda: _repository(session, config))
        # The daemon's alert of it is a finding already.
        if status is None or status.damage is None:
            yield from _safely("damage", lambda: places.known_damage(repository))
        absent = _absent(session, config, repository, probes)
        yield from _safely("file system", lambda: places.file_systems(config, repository, mounts, absent))
        yield from _safely(
            "free space", lambda: places.space(config, repository, mounts, status, probes, absent)
        )
        disks = [repository, *(root.path for root in config.roots)]
        priority = str(config.capture.io_priority)
        yield from _safely("io scheduler", lambda: machine.schedulers(disks, mounts, priority))
    yield from _safely("coverage", lambda: places.coverage(paths, config, probes))


def _repository(session: Session, config: Config) -> Iterable[Finding]:
    from ciuic.cli import doctor_checks as places

    # A repository that cannot be opened is a finding with a remedy, where _safely would only say that it was
    # not looked at.
    try:
        return places.repository_state(session.repository, config, session.now_ns)
    except CiuicError as error:
        return places.repository_state(error, config, session.now_ns)


def _absent(session: Session, config: Config, repository: Path, probes: Probes) -> str:
    from ciuic.cli.shared.new_repository import absent_repository

    # The marks lie beside or in the roots: one that does not answer must not hang this.
    roots = [root for root in config.roots if probes.answers(root.path)]
    try:
        return absent_repository(session, roots, repository)
    except CiuicError:
        # The daemon's failure to answer is a finding of its own.
        return ""


def _systemd() -> Systemd:
    from ciuic.cli.shared.systemd import Systemd

    return Systemd()


def _daemon(session: Session) -> tuple[StatusDocument | None, list[Finding]]:
    """Check what the daemon reports of itself, and its alerts."""
    try:
        status = session.control.status()
    except CiuicError as error:
        return None, [problem("daemon", error.message, error.hint)]
    findings = [ok("daemon", f"running, pid {status.pid}, version {status.version}")]
    for alert in status.alerts:
        make = problem if alert.severity == "problem" else warning
        findings.append(make("daemon", shown_text(alert.message), alert.hint))
    return status, findings


def _safely(check: str, run: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """A check's findings; that it cannot look is a finding, too."""
    try:
        yield from run()
    except (CiuicError, OSError) as error:
        yield warning(
            check,
            f"could not be looked at: {shown_text(str(error))}",
            "run it as root" if os.geteuid() else "see above",
        )
