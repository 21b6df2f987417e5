"""``ciuic protect`` and ``ciuic unprotect``: put directories under protection, and end it.

Guarantees of ``protect``: every path is checked before anything is changed; then the repository exists, the roots are in the
configuration (durably), and a running daemon has mounted them. Run again it changes nothing. Processes and mounts that go
round the overlay are named: they are the reason why snapshots compare the whole tree.

Guarantees of ``unprotect``: files and snapshots stay as they are. Nothing is changed when one of the paths is no root; the
configuration is written before the daemon unmounts, so that a crash in between does not mount the root again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from ciuic.cli.shared.documents import Keys
from ciuic.cli.shared.messages import complain, plural, shown, shown_text, warn
from ciuic.cli.shared.new_repository import make_repository, refuse_absent_disk
from ciuic.cli.shared.options import DIRECTORY, FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.overlay_fate import overlay_fate, remedy
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, NotFound, NotPermitted, Unreachable, UsageError
from ciuic.system import service_manager

if TYPE_CHECKING:
    from ciuic.config import Config, RootConfig
    from ciuic.config.model import Driver
    from ciuic.system.bypass import Bypasser, BypassingMount


_MOUNT = Keys("place, shows, pid, command, elsewhere")
_ROOT = Keys(
    "path, added, mounted, bypassing (processes), work_tree (the git work tree around a new root, or null), bypassing_mounts",
    bypassing=Keys("pid, command, uid"),
    bypassing_mounts=_MOUNT,
)
_PROTECT = Keys("repository, repository_created, config, daemon, roots", "`protect`", roots=_ROOT)
_SHOWN_PROCESSES = 10


@click.command("protect", cls=FrameCommand)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=DIRECTORY)
@click.option(
    "--driver",
    type=click.Choice(["auto", "kernel", "pyfuse3"]),
    default="auto",
    help="What serves new roots; auto chooses.",
)
@click.option(
    "--new-repository",
    is_flag=True,
    help="Make a repository although the one there was lies on a disk that is not mounted.",
)
@click.option(
    "--offline",
    is_flag=True,
    help="Make a repository without asking the configured remote; it shares no chunks with other hosts.",
)
@json_option
def protect_command(
    paths: tuple[bytes, ...], driver: Driver, new_repository: bool, offline: bool, as_json: bool
) -> None:
    """Protect directories: from now on they are in every snapshot.

    A running daemon mounts them at once, in place. Nothing is copied or moved.
    """
    # A path that is given twice, or by two links, is one root.
    asked = list(dict.fromkeys(_canonical(path) for path in paths))
    protect(current(), asked, driver, new_repository=new_repository, offline=offline, as_json=as_json)


def protect(
    session: Session,
    asked: Sequence[Path],
    driver: Driver = "auto",
    *,
    new_repository: bool = False,
    offline: bool = False,
    as_json: bool = False,
) -> None:
    """Protect directories, whose paths are taken as they are, and print what was done."""
    from ciuic.config import add_roots, writable_file

    config = session.config
    new = _new_roots(config, asked, driver)
    # From here to add_roots in this order: what can be refused is refused before the repository is made, and
    # the repository is there before a configuration names roots.
    repository = _checked_repository(replace(config, roots=(*config.roots, *new)), new)
    file = writable_file(session.config_option)
    _require_writable(file)
    if not new_repository:
        refuse_absent_disk(session, [*config.roots, *new], repository)
    made = make_repository(session, repository, offline=offline)
    # Before the daemon mounts, like what follows: an overlay is a border of file systems.
    work_trees = {root.path: _work_tree_around(root.path) for root in new}
    # Before the daemon mounts: the overlay then covers the directory, and its own worker has it open.
    bypassing = {path: _going_round(path) for path in asked}
    added = [root.path for root in add_roots(file, new, repository_path=repository)]
    # After the file is durable: a daemon that is killed now finds the root in it when it starts again.
    mounted = _have_mounted(session, file, asked, driver)
    # find_spec does not import it, and with it trio. A daemon that runs says itself which driver serves.
    if not mounted and driver == "pyfuse3" and find_spec("pyfuse3") is None:
        warn(
            "pyfuse3 is not installed: the kernel driver will serve the new roots",
            hint="ciuic doctor says how to install it",
        )
    # After the daemon has mounted: what the overlay is propagated to is seen then.
    other_mounts = {path: _other_mounts(path) for path in asked}
    if as_json:
        roots = [
            _ROOT.of(
                path=path,
                added=path in added,
                mounted=mounted,
                bypassing=bypassing[path],
                work_tree=work_trees.get(path),
                bypassing_mounts=[
                    _MOUNT.of(mount, place=shown(mount.place), shows=shown(mount.shows))
                    for mount in other_mounts[path]
                ],
            )
            for path in asked
        ]
        out_json(
            _PROTECT.of(
                repository=repository, repository_created=made, config=file, daemon=mounted, roots=roots
            )
        )
    else:
        _say(asked, added, repository, made, mounted)
    for path in asked:
        _name_work_tree(path, work_trees.get(path))
        _name_processes(path, bypassing[path])
        _name_mounts(path, other_mounts[path])


def _canonical(path: bytes) -> Path:
    from ciuic.config import canonical_root, is_ciuic_mount
    from ciuic.restore.destination import open_way
    from ciuic.system import mountinfo

    try:
        # TOML is UTF-8, and so is the flat file.
        path.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(
            f"{shown(path)} is not UTF-8, and a configuration file cannot name it",
            hint="rename the directory, or protect the one above it",
        ) from None
    root = canonical_root(path.decode())
    absolute = os.path.abspath(path)
    if absolute != os.fsencode(root) and not is_ciuic_mount(root, mountinfo.read()):
        # Refuses a link of another user that leads to a directory of somebody else. OSError: what is there is said later.
        with suppress(OSError):
            os.close(open_way(absolute))
    return root


def _new_roots(config: Config, asked: Sequence[Path], driver: Driver) -> list[RootConfig]:
    from ciuic.config import RootConfig

    present = {root.path for root in config.roots}
    return [RootConfig(path, driver=driver) for path in dict.fromkeys(asked) if path not in present]


def _checked_repository(proposal: Config, new: Sequence[RootConfig]) -> Path:
    """Return where the repository is or will be; raise what is wrong with the new roots."""
    from ciuic.config import check_repository, check_roots, raise_for, repository_path
    from ciuic.system import mountinfo

    mounts = mountinfo.read()
    raise_for(check_roots(proposal.roots, mounts, new))
    problems = check_repository(proposal, mounts)
    raise_for(problems)
    for problem in problems:
        warn(str(problem), hint=problem.hint)
    return repository_path(proposal, mounts)


def _require_writable(file: Path) -> None:
    """NotPermitted before anything is made, rather than after the repository is."""
    # The file and its directory may both be missing yet: what exists above them decides.
    there = file
    while not there.exists() and there != there.parent:
        there = there.parent
    if not os.access(there, os.W_OK):
        raise NotPermitted(
            f"{file} may not be written", hint="run it as root, or name another file with --config"
        )


def _going_round(path: Path) -> list[Bypasser]:
    """Return the processes that have files open below a directory that is about to be covered; none if it is mounted."""
    from ciuic.config import is_ciuic_mount
    from ciuic.system import mountinfo
    from ciuic.system.bypass import find_bypassing

    if is_ciuic_mount(path, mountinfo.read()):
        return []
    # Readers do no harm: only what is changed past the overlay is missed by tracking.
    return [process for process in find_bypassing(path, ignore_pids={os.getpid()}) if process.writes]


def _other_mounts(path: Path) -> list[BypassingMount]:
    from ciuic.system.bypass import find_bypassing_mounts

    return find_bypassing_mounts(path, ignore_pids={os.getpid()})


def _have_mounted(session: Session, file: Path, paths: Sequence[Path], driver: Driver) -> bool:
    """Tell the daemon and return True if one runs and has mounted the roots. Raises its refusal; the configuration stays changed."""
    try:
        status = session.control.status()
    except Unreachable:
        return False
    # A daemon by hand may have another file: the root is mounted now, and gone after its next start.
    if status.config_path and Path(status.config_path).resolve() != file.resolve():
        warn(
            f"the running daemon reads {shown_text(status.config_path)}, not {file}",
            hint=f"it will not protect these roots after its next start; name the file with --config {status.config_path}",
        )
    for path in paths:
        # One by one: a refusal names its root, and those before it are mounted.
        served = session.control.add_root(str(path))
        if driver not in ("auto", served.driver):
            warn(
                f"{shown_text(str(path))} is served by the {served.driver} driver, not by {driver}",
                hint=shown_text(served.driver_why),
            )
        elif served.driver_why and not served.passthrough:
            warn(f"{shown_text(str(path))}: {shown_text(served.driver_why)}")
    return True


def _say(asked: Sequence[Path], added: Sequence[Path], repository: Path, made: bool, mounted: bool) -> None:
    if made:
        out(f"repository {shown_text(str(repository))} made")
    for path in asked:
        state = "protected" if path in added else "was protected already"
        out(f"{shown_text(str(path))} {state}{', mounted' if mounted else ''}")
    if not mounted:
        note("no daemon is running, so nothing is mounted yet")
        note(f"  {service_manager.start_hint()}")


def _name_processes(path: Path, processes: Sequence[Bypasser]) -> None:
    if not processes:
        return
    warn(
        f"{plural(len(processes), 'running process has', 'running processes have')} files open below "
        f"{shown_text(str(path))} and {'goes' if len(processes) == 1 else 'go'} round the overlay",
        hint="their changes are found by comparing the whole tree, until they are restarted:",
    )
    for process in processes[:_SHOWN_PROCESSES]:
        held = ", ".join(shown(use.path) for use in process.uses[:3])
        complain(f"    {process.pid}  {shown_text(process.command)}  {held}")
    if len(processes) > _SHOWN_PROCESSES:
        complain(f"    and {len(processes) - _SHOWN_PROCESSES} more")


def _work_tree_around(path: Path) -> Path | None:
    """Return the git work tree that a directory lies in without being its top, as git looks for it; None where there is none."""
    device = os.lstat(path).st_dev
    for top in (path, *path.parents):
        # Git itself stops at such a border, so nothing changes for it.
        if os.lstat(top).st_dev != device:
            return None
        # A file in linked work trees and in submodules.
        if os.path.isfile(top / ".git") or os.path.isfile(top / ".git" / "HEAD"):
            return top if top != path else None
    return None


def _name_work_tree(path: Path, top: Path | None) -> None:
    if top is None:
        return
    warn(
        f"{shown_text(str(path))} lies in the git work tree {shown_text(str(top))} and is a mount point as a root: git finds no "
        "repository from there",
        hint=f"set GIT_DISCOVERY_ACROSS_FILESYSTEM=1 for programs that run git there, or protect the whole work tree instead: "
        f"ciuic unprotect {shown_text(shlex.quote(str(path)))}; ciuic protect {shown_text(shlex.quote(str(top)))}",
    )


def _name_mounts(path: Path, mounts: Sequence[BypassingMount]) -> None:
    from ciuic.system.bypass import REMEDY

    if not mounts:
        return
    warn(f"{shown_text(str(path))} can be written without passing the overlay", hint=f"{REMEDY}:")
    for mount in mounts[:_SHOWN_PROCESSES]:
        complain(f"    {shown_text(str(mount))}")
    if len(mounts) > _SHOWN_PROCESSES:
        complain(f"    and {len(mounts) - _SHOWN_PROCESSES} more")


@click.command("unprotect", cls=FrameCommand)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=DIRECTORY)
@json_option
def unprotect_command(paths: tuple[bytes, ...], as_json: bool) -> None:
    """Stop protecting directories.

    A running daemon unmounts them, at once or when the last process that is in one has left. The files stay where they are, and so do their snapshots. What ciuic keeps
    beside a directory (.ciuic-state) is removed then.
    """
    from ciuic.config import canonical_root

    session = current()
    # A root's own path first: the owner of a directory above may have put a link there that leads to another root.
    known = {root.path for root in session.config.roots}
    named = [(Path(os.path.abspath(os.fsdecode(path))), path) for path in paths]
    asked = [absolute if absolute in known else canonical_root(os.fsdecode(path)) for absolute, path in named]
    unprotect(session, list(dict.fromkeys(asked)), as_json=as_json)


def end_protection(session: Session, asked: Sequence[Path]) -> bool:
    """Stop protecting directories, whose paths are taken as they are; return True if a daemon runs and unmounts them."""
    from ciuic.config import remove_roots, writable_file

    configured = [root.path for root in session.config.roots]
    for path in asked:
        if path not in configured:
            known = ", ".join(map(str, configured)) or "none"
            raise NotFound(
                f"{shown_text(str(path))} is not a protected root", hint=f"the roots are: {shown_text(known)}"
            )
    # Before the daemon unmounts: one that is killed in between does not mount the root again when it starts.
    remove_roots(writable_file(session.config_option), asked)
    return _have_unmounted(session, asked)


def unprotect(session: Session, asked: Sequence[Path], *, as_json: bool = False) -> None:
    """Stop protecting directories, whose paths are taken as they are, and print what was done."""
    unmounted = end_protection(session, asked)
    if as_json:
        out_json({"roots": [{"path": str(path), "removed": True} for path in asked], "daemon": unmounted})
    else:
        for path in asked:
            fate = f"; {overlay_fate(str(path))}" if unmounted else ""
            out(f"{shown_text(str(path))} is no longer protected{fate}")


def _have_unmounted(session: Session, paths: Sequence[Path]) -> bool:
    """Tell the daemon; return True if one runs and unmounts the roots."""
    from ciuic.config import is_ciuic_mount
    from ciuic.system import mountinfo

    try:
        for path in paths:
            session.control.remove_root(str(path))
    except Unreachable:
        mounts = mountinfo.read()
        left = [str(path) for path in paths if is_ciuic_mount(path, mounts)]
        if left:
            # An overlay worker outlives its daemon by design; only a daemon ends it in good order.
            raise Unreachable(
                f"taken out of the configuration, but {shown_text(', '.join(left))} "
                f"{'is' if len(left) == 1 else 'are'} still mounted and no daemon answers that could unmount",
                hint=remedy(left, "which lets go of it"),
            ) from None
        for path in paths:
            _remove_state(session, path)
        return False
    return True


def _remove_state(session: Session, path: Path) -> None:
    """Remove the saved tracking of a root that no daemon serves; what cannot be removed stays, and harms nothing."""
    from ciuic.protocol.state_directory import remove_state
    from ciuic.protocol.worker_frames import worker_socket
    from ciuic.restore.destination import open_way

    if worker_socket(session.config.runtime_dir, str(path)).exists():
        # A worker goes on serving files that a job has open, and needs its state for them.
        return
    # Suppressed: the directory is gone, may not be read, or a link of another user leads there.
    with suppress(OSError, CiuicError):
        # By descriptor: the name may lead elsewhere a moment later.
        fd = open_way(os.fsencode(path))
        try:
            remove_state(fd)
        finally:
            os.close(fd)
