"""Game day: kill a training on a copy, resume it from a snapshot, and compare it with one that was not disturbed.

The copy lies below a daemon of its own, with a repository of its own: what is tested is what would happen, the overlay, the capture
of a cut, the choice of the last good checkpoint and its restore. The training sees its copy at the path of the original, in a mount
namespace (`ciuic.system.isolated_command`), so that also absolute paths lead to the copy.

Guarantees: everything lies in the scratch directory, and nothing that this starts is left on return; the original is only read, from
its repository. Ends when the scratch directory's file system has less than `_MIN_FREE_SHARE` free. A daemon of a game day that was killed is asked to
end by the kernel, and `empty_leftover` detaches its mount.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from ciuic.errors import CiuicError
from ciuic.history import last_good, timelines
from ciuic.maintenance.drill import DrillResult, require_space, restore_whole
from ciuic.printable import one_line
from ciuic.protocol.control import ControlClient
from ciuic.repository import Repository
from ciuic.system import mountinfo
from ciuic.system.child_process import environment, find_program, module_command
from ciuic.system.isolated_command import IsolatedCommand, ends_with_parent
from ciuic.types import Snapshot

PREFIX: Final = "ciuic-game-day-"
"""Beginning of the names of scratch directories."""
_INTERRUPTED: Final = "interrupted"
_RESUMED: Final = "resumed"
_UNDISTURBED: Final = "undisturbed"
# Three copies, and the repository, which stores what is new of one.
_COPIES: Final = 4
_MIN_FREE_SHARE: Final = 0.05
_POLL_SECONDS: Final = 0.2
_DAEMON_SECONDS: Final = 120.0
_BLOCK_BYTES: Final = 1 << 20

_Stamp = tuple[int, int, int]
"""Size, time of the last change and inode of a file: what a program that writes it changes."""


class ResumeDifference(NamedTuple):
    """First file of the resumed training that is not that of the undisturbed one."""

    path: str
    """Relative to the directory."""
    offset: int | None
    """First byte that differs; None: one of them lacks the file."""
    what: Literal["content", "missing", "extra"]

    def __str__(self) -> str:
        """Return the difference as words."""
        if self.what == "content":
            return f"{one_line(self.path)} differs from byte {self.offset} on"
        lacks = "resumed" if self.what == "missing" else "undisturbed"
        return f"{one_line(self.path)} is not there in the {lacks} training"


class GameDayResult(NamedTuple):
    """Outcome of a game day."""

    restored: DrillResult
    """Comparison of the copy that the training began with."""
    difference: ResumeDifference | None = None
    compared: tuple[str, ...] = ()
    """Files that the resumed training wrote and that were compared, the oldest first."""
    run_seconds: float = 0.0
    """Time from the start of the training until it was killed."""
    lost_seconds: float = 0.0
    """Work between the checkpoint that was resumed from and the kill."""
    resumed_from: str = ""
    """Checkpoint that was resumed from."""
    restore_seconds: float = 0.0
    had_network: bool = False


def game_day(
    repository: Repository,
    snapshot: Snapshot,
    path: bytes,
    scratch: Path,
    *,
    command: str,
    globs: Sequence[str],
    env: Mapping[str, str],
    timeout_seconds: float,
    between: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> GameDayResult:
    """Run a training on a copy, kill it, resume it from a snapshot, and compare.

    Args:
        repository: Repository of the snapshot.
        snapshot: What the copies are made from.
        path: Directory of the training, absolute, as it was at the snapshot.
        scratch: Directory of this process alone, which the caller removes.
        command: Command line that trains, and resumes from the newest checkpoint in its working directory.
        globs: Names of checkpoints, relative to the directory.
        env: Environment of the command.
        timeout_seconds: Time after which each of the three runs is ended.
        between: Called often, from any thread, so that the caller can pause.
        say: Told what is done next.

    Raises:
        NotFound: the snapshot does not have the path, or there is no GOOD checkpoint to resume from.
        CiuicError: the command failed, wrote no checkpoint in time, or left nothing to compare; or there is no space.
    """
    say("restoring the copy")
    result, place = restore_whole(repository, snapshot, path, _made(scratch / _INTERRUPTED), between=between)
    if result.damages:
        return GameDayResult(result)
    if not place.is_dir():
        raise CiuicError(
            f"{one_line(path)} is no directory in {snapshot.id}", hint="-p names the training's directory"
        )
    require_space(scratch, (_COPIES - 1) * result.bytes_total)
    runs = _Runs(command, globs, env, Path(os.fsdecode(path)), scratch, timeout_seconds)
    with _daemon(scratch, place) as client:
        say("training until there is a new checkpoint")
        run_seconds, killed_ns = runs.until_killed(place)
        say("killed; taking a snapshot")
        client.take_snapshot(wait=True)
    say("restoring the last good checkpoint")
    began = time.monotonic()
    with Repository.open(scratch / "repository") as own:
        found = timelines(own.snapshots.load_all()[0])
        chosen = last_good([(own, one) for one in found], os.fsencode(place))
        again, resumed = restore_whole(own, chosen.snapshot, os.fsencode(place), _made(scratch / _RESUMED))
    if again.damages:
        return GameDayResult(again)
    restore_seconds = time.monotonic() - began
    at_resume = runs.stamps(resumed)
    newest_ns = max((stamp[1] for stamp in at_resume.values()), default=0)
    say("training on")
    ended = runs.to_end(resumed)
    wanted = runs.written(resumed, at_resume, is_whole=ended)
    say("training undisturbed, to compare")
    undisturbed = restore_whole(repository, snapshot, path, _made(scratch / _UNDISTURBED), between=between)[1]
    before = runs.stamps(undisturbed)
    also_ended = runs.to_end(undisturbed, None if ended else set(wanted))
    there = runs.written(undisturbed, before, is_whole=also_ended or not ended)
    difference, compared = _compare(undisturbed, resumed, there, wanted, is_whole=ended and also_ended)
    if difference is None and not compared:
        raise CiuicError(
            f"the resumed training wrote no file that could be compared: {', '.join(map(one_line, globs))}",
            hint="--compare names its checkpoints, relative to the directory; --run-timeout gives it more time",
        )
    return GameDayResult(
        restored=result,
        difference=difference,
        compared=tuple(compared),
        run_seconds=run_seconds,
        # What a restored checkpoint of before the copy was lost is all that this run did.
        lost_seconds=min(run_seconds, max(0.0, (killed_ns - newest_ns) / 1e9)),
        resumed_from=os.path.relpath(os.fsdecode(chosen.checkpoint.checkpoint.path), place),
        restore_seconds=restore_seconds,
        had_network=runs.had_network,
    )


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700)
    return directory


class _Runs:
    """The training, run on one copy after the other."""

    def __init__(
        self,
        command: str,
        globs: Sequence[str],
        env: Mapping[str, str],
        original: Path,
        scratch: Path,
        timeout_seconds: float,
    ) -> None:
        self._command = command
        self._globs = globs
        self._env = env
        # Where the original is not on this machine, or without the privilege, the copies are at their own paths.
        self._shown_at = original if os.geteuid() == 0 and original.is_dir() else None
        self._scratch = scratch
        self._timeout_seconds = timeout_seconds
        self.had_network = False

    def _begin(self, place: Path) -> IsolatedCommand:
        shown = self._shown_at or place
        env = {**self._env, "CIUIC_DRILL_DIR": str(shown)}
        running = IsolatedCommand(self._command, place, env, shown_at=self._shown_at)
        self.had_network |= running.had_network
        return running

    def stamps(self, place: Path) -> dict[str, _Stamp]:
        """Return the files of a copy that the patterns name."""
        found = {}
        for pattern in self._globs:
            for one in place.glob(pattern):
                with suppress(OSError):
                    status = one.lstat()
                    if one.is_file() and not one.is_symlink():
                        stamp = (status.st_size, status.st_mtime_ns, status.st_ino)
                        found[str(one.relative_to(place))] = stamp
        return found

    def written(self, place: Path, before: Mapping[str, _Stamp], *, is_whole: bool) -> list[str]:
        """Return the files that a run has written, the oldest first; without the newest, if the run may have been writing it."""
        now = self.stamps(place)
        names = sorted(
            (name for name, stamp in now.items() if before.get(name) != stamp),
            key=lambda name: (now[name][1], name),
        )
        return names if is_whole else names[:-1]

    def until_killed(self, place: Path) -> tuple[float, int]:
        """Train until there is a new checkpoint that is not being written to, and kill it; return the time that it ran and when.

        Raises:
            CiuicError: it ended before, or wrote none in time.
        """
        before = self.stamps(place)
        with self._begin(place) as running:
            seen = before
            while (status := running.wait(_POLL_SECONDS)) is None:
                now = self.stamps(place)
                if any(before.get(name) != stamp == seen.get(name) for name, stamp in now.items()):
                    seconds = running.seconds
                    running.kill()
                    return seconds, time.time_ns()
                seen = now
                self._check(running, "without a new checkpoint")
        raise CiuicError(
            f"the command ended with exit status {status} before it could be killed",
            hint="it has to train for some seconds after a checkpoint that --compare names",
        )

    def to_end(self, place: Path, wanted: set[str] | None = None) -> bool:
        """Train until it ends, its time is over, or all these files are there and stay as they are; return whether it ended.

        Raises:
            CiuicError: it failed.
        """
        before = self.stamps(place)
        seen: dict[str, _Stamp] = {}
        with self._begin(place) as running:
            while (status := running.wait(_POLL_SECONDS)) is None:
                now = self.stamps(place)
                if wanted is not None and all(
                    before.get(name) != now.get(name) == seen.get(name) for name in wanted
                ):
                    return False
                seen = now
                if running.seconds > self._timeout_seconds:
                    return False
                self._check(running, "")
        if status:
            raise CiuicError(f"the command ended with exit status {status}")
        return True

    def _check(self, running: IsolatedCommand, late: str) -> None:
        if late and running.seconds > self._timeout_seconds:
            raise CiuicError(
                f"the command ran for {running.seconds:.0f} s {late}",
                hint="--run-timeout gives it more time; --compare names its checkpoints, relative to the directory",
            )
        status = os.statvfs(self._scratch)
        if status.f_bavail < _MIN_FREE_SHARE * status.f_blocks:
            raise CiuicError(
                f"the command has filled the file system of {one_line(str(self._scratch.parent))}",
                hint="--scratch names a directory with more room",
            )


def _compare(
    undisturbed: Path, resumed: Path, there: Sequence[str], wanted: Sequence[str], *, is_whole: bool
) -> tuple[ResumeDifference | None, list[str]]:
    """Return the first difference, in the order in which the resumed training wrote, and what is equal before it."""
    compared: list[str] = []
    for name in wanted:
        if name not in there:
            if is_whole:
                return ResumeDifference(name, None, "extra"), compared
            continue
        offset = _first_difference(undisturbed / name, resumed / name)
        if offset is not None:
            return ResumeDifference(name, offset, "content"), compared
        compared.append(name)
    if is_whole:
        # What was written before the kill is there as well: it was restored.
        missing = [name for name in there if not (resumed / name).exists()]
        if missing:
            return ResumeDifference(missing[0], None, "missing"), compared
    return None, compared


def _first_difference(one: Path, other: Path) -> int | None:
    with open(one, "rb") as left, open(other, "rb") as right:
        offset = 0
        while True:
            a, b = left.read(_BLOCK_BYTES), right.read(_BLOCK_BYTES)
            if a != b:
                equal = next(
                    (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
                )
                return offset + equal
            if not a:
                return None
            offset += len(a)


@contextmanager
def _daemon(scratch: Path, root: Path) -> Iterator[ControlClient]:
    """Protect a directory by a daemon with a repository of its own, until the block ends.

    Raises:
        CiuicError: it does not get so far.
    """
    config, log = scratch / "ciuic.toml", scratch / "daemon.log"
    names = [str(scratch / name) for name in ("repository", "run")]
    if not all(one.isprintable() and not set(one) & {'"', "\\"} for one in (*names, str(root))):
        raise CiuicError(
            f"{one_line(str(root))} has characters that a configuration cannot have",
            hint="--scratch names another place",
        )
    config.write_text(
        f'[repository]\npath = "{names[0]}"\n[daemon]\nruntime_dir = "{names[1]}"\n[capture]\nmin_share = "100%"\n'
        f'[schedule]\ninterval = "52w"\n[[root]]\npath = "{root}"\n'
    )
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            module_command("ciuic", "--config", str(config), "daemon"),
            cwd=scratch,
            env=environment(
                {name: value for name, value in os.environ.items() if not name.startswith("CIUIC_")}
            ),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            # It must not outlive this process.
            preexec_fn=ends_with_parent(signal.SIGTERM),
        )
    try:
        with ControlClient(scratch / "run/control.sock") as client:
            _wait_for_mount(client, process, root, log)
            yield client
    finally:
        process.terminate()
        try:
            process.wait(_DAEMON_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        empty_leftover(scratch)


def _wait_for_mount(client: ControlClient, process: subprocess.Popen[bytes], root: Path, log: Path) -> None:
    deadline = time.monotonic() + _DAEMON_SECONDS
    while True:
        with suppress(CiuicError):
            if any(one.path == str(root) and one.state == "mounted" for one in client.status().roots):
                return
        if process.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="backslashreplace").splitlines()[-3:]
            raise CiuicError(
                f"the daemon of the game day does not protect the copy: {one_line(' '.join(lines))}",
                hint="ciuic doctor says what this machine lacks",
            )
        time.sleep(_POLL_SECONDS)


def empty_leftover(scratch: Path) -> None:
    """Detach the mounts in the scratch directory of a game day."""
    below = os.fsencode(scratch) + b"/"
    for mount in reversed(mountinfo.read()):
        if mount.mount_point.startswith(below):
            command = [find_program("umount"), "--lazy", "--", os.fsdecode(mount.mount_point)]
            subprocess.run(command, cwd="/", env={}, capture_output=True, check=False)
