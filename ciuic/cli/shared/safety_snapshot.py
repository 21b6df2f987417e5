"""Safety snapshot: taken before a restore over a protected root, so that the restore can be undone.

Guarantees: it is committed when ``take`` returns its id; when none can be taken, ``take`` says why and returns None, and
never stops the restore: whoever restores at three in the morning with a full disk needs the files more.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ciuic.cli.shared.messages import complain, shown_text, warn
from ciuic.cli.shared.output import detail, note
from ciuic.cli.shared.progress import Reporter, progress
from ciuic.cli.shared.session import LOCK_WAIT_SECONDS, Session
from ciuic.errors import CiuicError, Unreachable
from ciuic.types import TAG_SAFETY

if TYPE_CHECKING:
    import subprocess

    from ciuic.retention import MinFree

# A snapshot of few changes is committed after 20 to 60 ms, and the restore waits for it; a long capture is asked about more seldom.
_FIRST_POLL_SECONDS: Final = 0.02
_MAX_POLL_SECONDS: Final = 0.2


def protected_roots(session: Session) -> list[Path]:
    """Return the roots of the configuration and of ciuic's mounts; the mounts alone if the configuration cannot be read."""
    from ciuic.config.places import CIUIC_FS_TYPE
    from ciuic.system import mountinfo

    mounted = [
        Path(os.fsdecode(mount.mount_point)) for mount in mountinfo.read() if mount.fs_type == CIUIC_FS_TYPE
    ]
    try:
        configured = [root.path for root in session.config.roots]
    except CiuicError as error:
        detail(f"the configuration cannot be read: {error.message}")
        configured = []
    return list(dict.fromkeys([*configured, *mounted]))


def covering(roots: Iterable[Path], targets: Sequence[bytes]) -> list[Path]:
    """Return the roots that contain one of the target paths, with symbolic links resolved."""
    # As roots are configured. A target above a root changes the root as well.
    real = [os.path.realpath(target) for target in targets]
    found = []
    for root in roots:
        top = os.fsencode(root)
        if any(
            path == top or path.startswith(top + b"/") or top.startswith(path.rstrip(b"/") + b"/")
            for path in real
        ):
            found.append(root)
    return found


def take(
    session: Session, roots: Sequence[Path], message: str, targets: Sequence[bytes], first: str = ""
) -> str | None:
    """Take and commit a snapshot of these roots and return its id; None, with a warning, if that is not possible.

    ``targets``: what the restore is about to change. It is noted, so that the snapshot stays for as long as it can undo that.
    ``first``: id of the safety snapshot of the restore that this one goes on with.
    """
    try:
        # The daemon cuts all roots at one instant, and knows what has changed; without it the trees are
        # compared.
        taken = _by_daemon(session, roots, message)
        if taken is None:
            taken = _offline(session, roots, message)
    except (CiuicError, OSError) as error:
        reason = error.message if isinstance(error, CiuicError) else str(error)
        warn(f"no safety snapshot: {shown_text(reason)}", hint="the restore goes on, and cannot be undone")
        return None
    except KeyboardInterrupt:
        complain("interrupted during the safety snapshot; nothing was restored (--no-safety leaves it out)")
        raise
    # Before anything is restored: a restore that is killed can be undone for as long.
    _note_restore(session, taken, roots, targets, first)
    note(f"safety snapshot {taken}")
    return taken


def tell_undo(taken: str) -> None:
    """Tell how to undo the restore for which this safety snapshot was taken."""
    note(f"to undo this restore: ciuic undo {taken}")


def _note_restore(
    session: Session, taken: str, roots: Sequence[Path], targets: Sequence[bytes], first: str
) -> None:
    """Note which paths the restore changes. Without the note the snapshot counts for all of its roots."""
    from ciuic.compare.restore_records import record_restore

    tops = [os.fsencode(root) for root in roots]
    paths = []
    for target in map(os.path.realpath, targets):
        inside = any(target == top or target.startswith(top + b"/") for top in tops)
        paths += [target] if inside else [top for top in tops if top.startswith(target.rstrip(b"/") + b"/")]
    try:
        record_restore(session.repository_dir, taken, paths, session.repository.snapshots.names(), first)
    except OSError as error:
        detail(f"what is restored was not noted: {error.strerror or error}")


def is_over(session: Session, taken: str, *, changed: bool) -> None:
    """Note that the restore for which this safety snapshot was taken has ended, and whether it may have changed something.

    Tell how to undo it, or that there is nothing to undo.
    """
    from ciuic.compare.restore_records import first_of, record_end

    if changed:
        # Of a restore that went on with one that was cut short: to what was before both, as `ciuic undo` alone does.
        tell_undo(first_of(session.repository_dir, taken))
    else:
        note("nothing was changed: there is nothing to undo")

    try:
        record_end(session.repository_dir, taken, time.time_ns(), changed=changed)
    except OSError as error:
        detail(f"the end of the restore was not noted: {error.strerror or error}")


def _by_daemon(session: Session, roots: Sequence[Path], message: str) -> str | None:
    """Have the daemon take it. None where no daemon answers, or it serves none of these roots."""
    try:
        served = {root.path for root in session.control.status().roots if root.state == "mounted"}
    except CiuicError as error:
        # Not permitted, no daemon, a broken configuration: the offline way may still be open.
        detail(error.message)
        return None
    wanted = [str(root) for root in roots if str(root) in served]
    # One snapshot of all or none: two of them would have to be restored from to undo one restore.
    if len(wanted) < len(roots):
        return None
    try:
        state = session.control.take_snapshot(message=message, tags=[TAG_SAFETY], roots=wanted)
        poll_seconds = _FIRST_POLL_SECONDS
        with progress("safety snapshot") as reporter:
            # An attempt that failed is enough to know: the daemon goes on trying, the restore does not wait
            # for that.
            while state.state != "committed":
                if state.error:
                    raise CiuicError(state.error, hint=state.hint)
                time.sleep(poll_seconds)
                poll_seconds = min(2 * poll_seconds, _MAX_POLL_SECONDS)
                state = session.control.snapshot_state(state.id)
                if state.progress is not None:
                    reporter.update(
                        bytes_done=state.progress.bytes_done,
                        bytes_total=state.progress.bytes_total,
                        files_done=state.progress.files_done,
                    )
        # A root that is missing cannot be put back, and the operator must know that before the restore
        # changes it.
        for root, reason in state.left_out.items():
            raise CiuicError(f"{state.id} was made without {root}: {reason}")
    except Unreachable:
        # It has ended meanwhile: the offline way is open.
        return None
    return state.id


def _offline(session: Session, roots: Sequence[Path], message: str) -> str:
    """Take it with a capture process and no overlay: not one instant, but nobody changes these files now."""
    # Few restores come here.
    import subprocess

    from ciuic.system.child_process import environment, module_command

    present = [root for root in roots if root.is_dir()]
    if not present:
        raise CiuicError("none of the roots is there")
    job = json.dumps(_offline_job(session, present, message)).encode("ascii")
    # A file, because a pipe that nobody reads while the progress is followed may fill, and both processes
    # wait.
    said = os.memfd_create("ciuic-capture-stderr")
    # Its own session: ^C ends it through us, in order, and not both at once.
    with (
        open(said, "r+b") as complaints,
        subprocess.Popen(
            module_command("ciuic.daemon.capture.process"),
            env=environment(),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            start_new_session=True,
        ) as process,
    ):
        try:
            with progress("safety snapshot") as reporter:
                last = _follow(process, job, reporter)
        except BaseException:
            process.terminate()
            raise
        process.wait()
        complaints.seek(0)
        # The last line: that of a traceback is the error, and what comes before it are events.
        complaint = complaints.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
    if process.returncode == 0 and last.get("id"):
        if last.get("left_out"):
            raise CiuicError(
                f"{last['id']} was made without some of the roots; `ciuic show` says which and why"
            )
        return str(last["id"])
    text = last.get("error") or complaint or f"capture ended with status {process.returncode}"
    raise CiuicError(shown_text(str(text)), hint=shown_text(str(last.get("hint", ""))))


def _offline_job(session: Session, roots: Sequence[Path], message: str) -> dict[str, object]:
    """Return the job of the capture process (daemon/capture/job.py): no overlay, this moment, these roots."""
    import base64
    import socket

    from ciuic.system.disk_space import reserve_of, total_bytes

    excludes: dict[Path, list[str]] = {}
    setting: MinFree | None = None
    try:
        config = session.config
        setting = config.repository.reserve
        excludes = {root.path: list(config.excludes_of(root)) for root in config.roots}
    except CiuicError as error:
        detail(f"no exclude patterns: {error.message}")
    reserve = reserve_of(setting, total_bytes(session.repository_dir))
    return {
        "repository": str(session.repository_dir),
        "id": str(session.own_repository.snapshots.new_id()),
        "time_ns": time.time_ns(),
        "host": socket.gethostname(),
        "roots": [
            {
                "path": base64.b64encode(os.fsencode(root)).decode("ascii"),
                "excludes": excludes.get(root, []),
            }
            for root in roots
        ],
        "tags": [TAG_SAFETY],
        "message": message,
        "lock_wait_seconds": LOCK_WAIT_SECONDS,
        # Somebody is waiting for this one.
        "io_priority": "none",
        "trust_repository": session.trusts_repository,
        "reserve_bytes": reserve.size_bytes,
        "reserve_reason": reserve.reason,
    }


def _follow(process: subprocess.Popen[bytes], job: bytes, reporter: Reporter) -> dict[str, object]:
    """Send the job, show the progress lines, and return the document of the last line."""
    last: dict[str, object] = {}
    assert process.stdin is not None
    # Suppressed: it has ended already, and its last words say why.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(job)
        process.stdin.close()
    for line in process.stdout or ():
        # Whatever else a library prints to stdout is no line of ours.
        try:
            last = json.loads(line)
        except ValueError:
            continue
        if last.get("event") == "progress":
            reporter.update(
                bytes_done=_number(last, "bytes_read"),
                bytes_total=0,
                files_done=_number(last, "entries"),
                files_total=_number(last, "entries_expected"),
            )
    return last


def _number(document: dict[str, object], key: str) -> int:
    value = document.get(key, 0)
    return value if isinstance(value, int) else 0
