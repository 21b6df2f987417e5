"""``ciuic doctor``: what a careful operator would look at, looked at.

Guarantees: nothing is changed; one check that fails itself is a finding and does not stop the others; exit code 0 unless
there is a problem (1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import click

from ciuic.cli.inquiry import Finding, Inquiry, ok, problem, warning
from ciuic.cli.shared.messages import plural, shown_text
from ciuic.cli.shared.options import HOST_PATH, FrameCommand
from ciuic.cli.shared.output import json_option, out, out_json, out_prose, wrapped
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ciuic.cli.inquiry import Inquiry
    from ciuic.cli.shared.systemd import Systemd
    from ciuic.config import Config
    from ciuic.protocol.control_types import StatusDocument
    from ciuic.system.mountinfo import Mount

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

    inquiry = Inquiry()
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
    yield from _safely("driver", lambda: machine.driver(wanted, release, served, inquiry))
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
    yield from _places(session, config, paths, mountinfo.read(), status, inquiry)
    if config.remotes:
        yield from _safely("libraries", machine.libraries)
    yield from _safely("io pressure", machine.pressure)
    yield from _safely("clock", machine.clock)


def examine_recovery(session: Session) -> Iterator[Finding]:
    """Tick the recovery checklist, in its order."""
    from ciuic.cli import recovery_checks as checks
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
    yield from _safely(
        "recovery: work at risk", lambda: checks.snapshots_are_young(repository, config, now_ns)
    )
    yield from checks.retention_reaches_back(config)
    yield from checks.nothing_is_damaged(session.repository_dir)
    drills = read_drills(session.repository_dir)
    yield from checks.last_drill_is_good(drills, config.drill.every_seconds, now_ns)
    yield from checks.there_is_another_place(config)
    for remote in config.remotes:
        yield from _safely(
            f"recovery: remote {remote.name}",
            partial(checks.remote_has_it, repository, remote, now_ns),
        )
        yield from _safely(f"recovery: key {remote.name}", partial(checks.key_is_elsewhere, remote))
    inquiry = Inquiry()
    yield from _safely("recovery: room", lambda: checks.restore_has_room(repository, config, inquiry))


def _places(
    session: Session,
    config: Config,
    paths: tuple[bytes, ...],
    mounts: list[Mount],
    status: StatusDocument | None,
    inquiry: Inquiry,
) -> Iterator[Finding]:
    from ciuic.cli import doctor_checks as machine
    from ciuic.cli import doctor_checks as places

    # A running daemon looks for such processes itself, and its alerts are findings already.
    yield from _safely(
        "roots", lambda: places.roots(config, mounts, look_for_bypass=status is None, inquiry=inquiry)
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
        absent = _absent(session, config, repository, inquiry)
        yield from _safely("file system", lambda: places.file_systems(config, repository, mounts, absent))
        yield from _safely(
            "free space", lambda: places.space(config, repository, mounts, status, inquiry, absent)
        )
        disks = [repository, *(root.path for root in config.roots)]
        priority = str(config.capture.io_priority)
        yield from _safely("io scheduler", lambda: machine.schedulers(disks, mounts, priority))
    yield from _safely("coverage", lambda: places.coverage(paths, config, inquiry))


def _repository(session: Session, config: Config) -> Iterable[Finding]:
    from ciuic.cli import doctor_checks as places

    # A repository that cannot be opened is a finding with a remedy, where _safely would only say that it was
    # not looked at.
    try:
        return places.repository_state(session.repository, config, session.now_ns)
    except CiuicError as error:
        return places.repository_state(error, config, session.now_ns)


def _absent(session: Session, config: Config, repository: Path, inquiry: Inquiry) -> str:
    from ciuic.cli.shared.new_repository import absent_repository

    # The marks lie beside or in the roots: one that does not answer must not hang this.
    roots = [root for root in config.roots if inquiry.answers(root.path)]
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
