"""``ciuic drill``: would a restore from the repository work, and how long would it take?

Guarantees: files are restored into a scratch directory, compared with the snapshot and removed again; nothing else is changed. It
yields to processes that wait for the disk (ciuic.system.io_throttle). The outcome is noted beside the repository's own files for the
status and the metrics, also where the drill fails. Exit 4 exactly when something did not come back as the snapshot has it.

The command of ``--run`` has no network where that is possible, and limits of time and memory. Guarantees: no process of its group is
left on return, however it ended. Of all processes it is the first to end where memory runs out. Run by root it has the given user's
rights and no capabilities, and can gain none. What it prints goes to standard error, because standard output is for results.

References:
    unshare(1), setpriv(1), network_namespaces(7), capabilities(7), proc_pid_oom_score_adj(5), setrlimit(2)
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from ciuic.cli.shared import drills
from ciuic.cli.shared.drills import say
from ciuic.cli.shared.messages import json_name, plural, shown_text, warn
from ciuic.cli.shared.options import ID, SNAPSHOT_PATH, FrameCommand
from ciuic.cli.shared.output import json_option, note, out, out_json
from ciuic.cli.shared.session import Session, current
from ciuic.errors import CiuicError, Damaged, NotFound, UsageError
from ciuic.system.child_process import as_user, find_program, leave_keyring
from ciuic.units import human_duration

if TYPE_CHECKING:
    from ciuic.protocol.last_drill import LastDrill
    from ciuic.types import Snapshot

# The loopback device of a new network namespace is down. $1 is ip(8), the others are the command.
_SCRIPT: Final = '"$1" link set lo up 2>/dev/null; shift; exec "$@"'
# Highest score: the first that the kernel ends where memory runs out.
_OOM_SCORE: Final = b"1000"
# From the request to end until the group is killed.
_END_SECONDS: Final = 5.0
_STDERR: Final = 2
_PR_SET_PDEATHSIG: Final = 1


class CommandEnd(NamedTuple):
    """Outcome of a command."""

    status: int
    """Exit status, or 128 and the number of the signal that ended it."""
    seconds: float
    timed_out: bool
    had_network: bool
    """True if no network namespace could be made."""


def run_isolated(
    command: str,
    directory: Path,
    env: Mapping[str, str],
    timeout_seconds: float | None,
    *,
    user: tuple[int, int] | None = None,
) -> CommandEnd:
    """Run a command by the shell, in an empty network namespace where that is permitted, and end what is left of it.

    Args:
        command: Command line for sh(1).
        directory: Its working directory.
        env: Its environment.
        timeout_seconds: Time after which it is ended; None: never.
        user: Uid and gid whose rights it has, without capabilities; None: those of this process. Needs root.
    """
    argv, env = ["/bin/sh", "-c", command], dict(env)
    if user is not None:
        argv, env = as_user(argv, env, *user)
    # A user who is not root may make one in a user namespace, unless that is forbidden.
    own = () if os.geteuid() == 0 else ("--user", "--map-current-user")
    unshare = [find_program("unshare"), *own, "--net"]
    had_network = not _works([*unshare, "/bin/true"])
    if not had_network:
        argv = [*unshare, "/bin/sh", "-c", _SCRIPT, "sh", find_program("ip"), *argv]
    began = time.monotonic()
    process = subprocess.Popen(
        argv,
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        start_new_session=True,
        preexec_fn=_limits(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2),
    )
    timed_out = False
    try:
        process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        _end_group(process)
    status = process.returncode
    return CommandEnd(
        128 - status if status < 0 else status, time.monotonic() - began, timed_out, had_network
    )


def _limits(memory_bytes: int) -> Callable[[], None]:
    """Return what the child calls before it runs a program: parent-death signal, data limit, highest OOM score."""
    # Loaded here: between fork and exec nothing may be imported.
    libc, leave = ctypes.CDLL(None), leave_keyring()

    def apply() -> None:
        leave()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or hard > memory_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        # Read-only in some containers: then it has the score of its parent.
        with suppress(OSError):
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(fd, _OOM_SCORE)
            os.close(fd)

    return apply


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, cwd="/", env={}, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the command's process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_RUN_SECONDS = 3600


@click.command("drill", cls=FrameCommand)
@click.argument("id_", metavar="[ID]", type=ID, required=False)
@drills.sample_options
@click.option(
    "-p",
    "--path",
    "paths",
    multiple=True,
    metavar="PATH",
    type=SNAPSHOT_PATH,
    help="Only what is at or below PATH, as it was at the snapshot; may be given several times.",
)
@click.option(
    "--run",
    metavar="CMD",
    help="Restore all of one PATH, or of the directory with the newest checkpoint, and run CMD in it by the shell, without network; "
    "its exit status counts.",
)
@click.option(
    "--as-root",
    is_flag=True,
    help="Run CMD as root, with all capabilities, not as the owner of what is restored.",
)
@click.option(
    "--run-timeout",
    metavar="DURATION",
    help="End CMD after this time; default: 1h.",
)
@json_option
def command(
    id_: str | None,
    sample: str | None,
    seed: int | None,
    scratch: Path | None,
    paths: tuple[bytes, ...],
    run: str | None,
    as_root: bool,
    run_timeout: str | None,
    as_json: bool,
) -> int:
    """Prove that a restore works: restore a sample of a snapshot into a scratch directory, and compare it.

    Without ID, the newest snapshot and one at random. The newest checkpoint is restored whole, other files are chosen at random.
    Content, attributes and links are compared. Exit 4 on damage. With -p or a smaller --sample, status and alerts
    count damage alone, and how --run ended.

    With --run, the newest snapshot alone. CMD finds the restored directory in CIUIC_DRILL_DIR and as its working directory; exit 1
    if it fails. Root runs it as the directory's owner, without capabilities.
    """
    from ciuic.maintenance.drill import choose_snapshots, failed_outcome

    session = current()
    if session.remote_url is not None:
        raise UsageError(
            "this drills the repository of this host, and --repo names a remote",
            hint="ciuic remote drill URL drills a remote",
        )
    if run is not None and len(paths) > 1:
        raise UsageError("--run restores one path: give -p once")
    if run is None and (as_root or run_timeout is not None):
        raise UsageError("--run-timeout and --as-root go with --run")
    if run is not None:
        session.require_trust()
    timeout_seconds = _timeout(run_timeout)
    limit_bytes = drills.sample_bytes(sample)
    seed = drills.new_seed() if seed is None else seed
    began = time.monotonic()
    documents: list[dict[str, Any]] = []
    try:
        store = session.snapshots
        chosen = [store.load(store.resolve(id_))] if id_ is not None else choose_snapshots(store, seed)
        for snapshot in chosen[: 1 if run is not None else None]:
            if run is not None:
                document = _drill_run(
                    session, snapshot, scratch, next(iter(paths), None), run, timeout_seconds, as_root
                )
            else:
                document = _drill(session, snapshot, scratch, seed, limit_bytes, paths)
            documents.append(document)
            if not as_json:
                _print(documents[-1], is_first=len(documents) == 1)
    except (UsageError, NotFound):
        # The drill did not begin.
        raise
    except CiuicError as error:
        _note(session, failed_outcome(error, time.monotonic() - began))
        raise
    worst = next((one for one in documents if one["verdict"] != "good"), documents[0])
    seconds = time.monotonic() - began
    # Damage counts wherever it was found; that all is well was not proven by a part that was picked. A command that succeeds takes back
    # that it failed, and no damage.
    is_whole = not paths and limit_bytes >= drills.sample_bytes(None)
    if worst["verdict"] != "good" or is_whole or (run is not None and not _damage_stands(session)):
        _note(session, drills.outcome(worst, seconds))
    else:
        note("not noted as a drill of this repository: only a part was asked for")
    if as_json:
        out_json({"verdict": worst["verdict"], "seconds": seconds, "drills": documents})
    if worst["verdict"] == "failed":
        return CiuicError.exit_code
    return Damaged.exit_code if worst["verdict"] == "damaged" else 0


def _timeout(text: str | None) -> int:
    from ciuic.units import parse_duration

    try:
        return _RUN_SECONDS if text is None else parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--run-timeout: {error}") from None


def _drill(
    session: Session,
    snapshot: Snapshot,
    scratch: Path | None,
    seed: int,
    sample_bytes: int,
    paths: Sequence[bytes],
) -> dict[str, Any]:
    from ciuic.cli.shared.progress import progress
    from ciuic.maintenance.drill import run_drill, scratch_directory

    began = time.monotonic()
    with scratch_directory(drills.scratch_parent(scratch)) as place, progress("drill") as reporter:
        result = run_drill(
            session.repository,
            snapshot,
            place,
            seed=seed,
            sample_bytes=sample_bytes,
            within=paths,
            patterns=session.checkpoint_patterns,
            between=_pace(session),
            progress=lambda done, total: reporter.update(bytes_done=done, bytes_total=total),
        )
    if not result.files and not result.damages:
        raise NotFound(
            f"{snapshot.id} has no file to restore{' there' if paths else ''}: a drill of nothing proves nothing"
        )
    return {**drills.result_document(session, snapshot, result), "seconds": time.monotonic() - began}


def _drill_run(
    session: Session,
    snapshot: Snapshot,
    scratch: Path | None,
    path: bytes | None,
    command_line: str,
    timeout_seconds: int,
    as_root: bool,
) -> dict[str, Any]:
    """Restore a path whole, and run a command on it if it is exact."""
    from ciuic.maintenance.drill import newest_checkpoint_directory, restore_whole, scratch_directory
    from ciuic.system.child_process import without_secrets

    began = time.monotonic()
    repository = session.repository
    with scratch_directory(drills.scratch_parent(scratch)) as place:
        own = place / "restored"
        own.mkdir(0o700)
        patterns = session.checkpoint_patterns
        path = path or newest_checkpoint_directory(repository, snapshot, patterns)
        result, restored = restore_whole(
            repository, snapshot, path, own, patterns=patterns, between=_pace(session)
        )
        document = drills.result_document(session, snapshot, result)
        document["run"] = None
        if not result.damages:
            directory = restored if restored.is_dir() else own
            env = {**without_secrets(os.environ), "CIUIC_DRILL_DIR": str(restored)}
            user = None
            if os.geteuid() == 0 and not as_root:
                of = os.lstat(restored)
                user = (of.st_uid, of.st_gid)
                # Nobody else gets to what was restored: the directories above it may have been closed.
                os.chown(own, *user)
                place.chmod(0o711)
            end = run_isolated(command_line, directory, env, timeout_seconds, user=user)
            document["run"] = {"command": command_line, **json_name("path", path), **end._asdict()}
            if end.status or end.timed_out:
                document["verdict"] = "failed"
                document["reason"] = (
                    f"the command did not end within {human_duration(timeout_seconds)}"
                    if end.timed_out
                    else f"the command ended with exit status {end.status}"
                )
    document["seconds"] = time.monotonic() - began
    return document


def _pace(session: Session) -> Callable[[], None]:
    """Return the function that pauses while other processes wait for the disk."""
    from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files
    from ciuic.system.urgency import MIN_SHARE

    try:
        waits, share = waits_files(str(session.config.runtime_dir)), session.config.capture.min_share
    except CiuicError:
        # --repo works without any configuration.
        waits, share = [], MIN_SHARE
    return Pace(gauges(waits), min_share=share, processor_waits=processor_waits()).step


def _damage_stands(session: Session) -> bool:
    from ciuic.protocol.last_drill import read_drills, standing_drill

    standing = standing_drill(read_drills(session.repository_dir))
    return standing is not None and standing.verdict == "damaged"


def _note(session: Session, drill: LastDrill) -> None:
    """Keep the outcome for the status and the metrics."""
    from ciuic.protocol.last_drill import add_drill
    from ciuic.repository.trust import foreign_flaw

    place = session.repository_dir
    # Nothing is written into a repository that belongs to another user.
    if foreign_flaw(place) is not None and not session.trusts_repository:
        return
    try:
        add_drill(place, drill)
    except OSError as error:
        hint = ""
        if error.errno in (errno.EACCES, errno.EPERM):
            hint = "run it as the owner of the repository: ciuic status shows it then"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "there is no room for the record: make some, and repeat the drill"
        warn(f"the outcome could not be noted in {shown_text(os.fspath(place))}: {error.strerror}", hint=hint)


def _print(document: dict[str, Any], *, is_first: bool) -> None:
    if not is_first:
        out()
    drills.print_result(document)
    drills.print_verdicts(document)
    drills.print_damages(document)
    if ran := document.get("run"):
        network = (
            "; with the network: no namespace could be made" if ran["had_network"] else ", without network"
        )
        say(f"run        exit status {ran['status']} after {ran['seconds']:.1f} s{network}")
    took = f"{document['seconds']:.0f} s, {plural(document['files'], 'file')}"
    if document["verdict"] == "failed":
        say(f"verdict    FAILED, {took}: {shown_text(document['reason'])}", fg="red")
    elif document["damages"]:
        say(f"verdict    DAMAGED, {took}; ciuic verify --checksum says how far it goes", fg="red")
    else:
        say(f"verdict    exact, {took}", fg="green")
