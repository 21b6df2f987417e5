"""Paired snapshots of files that trainers request from the daemon: permission, instant and links."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.live import Live
from support.second_user import MADE_UP, User, run_as
from support.until import until

from ciuic.errors import CiuicError, NotFound, Unreachable, UsageError
from ciuic.protocol import pairing
from ciuic.repository import Repository
from ciuic.types import Pair, SnapshotId

pytestmark = pytest.mark.mount
TRAINER = User(54321, 54321)
_ASK = """
from ciuic.protocol import pairing
def ask(path, *roots):
    question = pairing.Cut(training="cs-aaaaaaaa", repository="/home/x/snapshots", time_ns=1, message="step 3", roots=roots)
    with pairing.ask(path, question) as connection:
        return pairing.answer(connection, 30)
def ask_files(path, **fields):
    with pairing.ask(path, pairing.Files(**fields)) as connection:
        return pairing.answer(connection, 30)
"""


def _socket(live: Live) -> str:
    return str(live.top / "run" / pairing.SOCKET_NAME)


def _cut(live: Live, **fields: object) -> pairing.Taken:
    wanted = {"training": "cs-aaaaaaaa", "repository": "/home/x/snapshots", "time_ns": 1, **fields}
    with pairing.ask(_socket(live), pairing.Cut(**wanted)) as connection:  # type: ignore[arg-type]
        found = pairing.answer(connection, 30)
    assert isinstance(found, pairing.Taken)
    return found


def _committed(live: Live, id_: str) -> Pair | None:
    def is_there() -> bool:
        # The process that serves the socket is started beside the roots: a daemon just started may have none
        # yet.
        with suppress(Unreachable):
            return pairing.states_of(_socket(live), (id_,), 30).states == {id_: "committed"}
        return False

    until("the snapshot", is_there)
    with Repository.open(live.repository) as repository:
        return repository.snapshots.load(SnapshotId.parse(id_)).pair


def test_writes_before_a_request_are_in_its_snapshot(protected: Live, root: Path) -> None:
    """A requested snapshot holds what was written before the request, also in a file still open for writing.

    It names its other half, and the answer states the instant. A snapshot promised before the daemon is
    killed is committed by the next one, with the same fields.
    """
    for number in range(2):
        with open(root / "log", "ab", buffering=0) as log:
            log.write(b"%d\n" % number)
            before_ns = time.time_ns()
            taken = _cut(protected, time_ns=before_ns, message="step 3", hold_reason="for the paper")
        assert before_ns <= taken.time_ns <= time.time_ns()
        assert taken.roots == (str(root),)
        assert taken.repository == str(protected.repository)
        assert _committed(protected, taken.id) == Pair(
            of="training", id="cs-aaaaaaaa", repository="/home/x/snapshots", time_ns=before_ns
        )
        shown = protected.run("show", "--json", taken.id).stdout.decode()
        assert '"files of cs-aaaaaaaa: step 3"' in shown
        assert '"for the paper"' in shown
        protected.run("restore", "-s", taken.id, "-p", f"{root}/log", "-d", f"{protected.top}/out-{number}")
        assert (protected.top / f"out-{number}/log").read_bytes() == b"".join(
            b"%d\n" % written for written in range(number + 1)
        )
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(protected.repository)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        taken = _cut(protected, time_ns=7)
        protected.stop(signal.SIGKILL)
    finally:
        holder.communicate(timeout=30)
    protected.start(root)
    assert _committed(protected, taken.id) == Pair(
        of="training", id="cs-aaaaaaaa", repository="/home/x/snapshots", time_ns=7
    )


def test_a_trainer_may_request_only_roots_that_it_can_write(
    protected: Live, root: Path, short_tmp: Path
) -> None:
    """A user may have only those roots captured that the user may write, as owner or by group.

    The request gives no right to read it, and other roots are refused.
    """
    (protected.top / "run").chmod(0o755)
    for directory in (short_tmp.parent, short_tmp, protected.top):
        directory.chmod(0o755)
    other = short_tmp / "other"
    other.mkdir()
    protected.run("protect", str(other))
    request_program = f"print(ask({_socket(protected)!r}).roots, end='')"

    def tried(user: User, script: str = request_program) -> str:
        done = run_as(user, script, imports=_ASK)
        return done.stdout + done.stderr.strip().rpartition("\n")[2]

    assert "no protected root belongs to you" in tried(TRAINER)
    os.chown(root, TRAINER.uid, -1)
    assert tried(TRAINER) == str((str(root),))
    assert "no protected root belongs to you" in tried(MADE_UP._replace(uid=54322))
    refused = f"ask({_socket(protected)!r}, {str(other)!r})"
    assert f"NotPermitted: {other} does not belong to you" in tried(TRAINER, refused)
    os.chown(root, 0, TRAINER.gid)
    root.chmod(0o755)
    assert "no protected root belongs to you" in tried(TRAINER)
    root.chmod(0o775)
    assert tried(User(54399, 54399, (TRAINER.gid,))) == str((str(root),))


@pytest.mark.full
def test_an_impossible_request_fails_at_once(protected: Live, root: Path) -> None:
    """An unprotected directory, an invalid request or a missing daemon gives an error at once.

    A hanging daemon keeps no caller waiting, and cuts what was requested when it continues.
    """
    with pytest.raises(NotFound, match="/etc is not protected"):
        _cut(protected, roots=("/etc",))
    with pytest.raises(CiuicError):
        _cut(protected, training="../../x")
    with pytest.raises(CiuicError):
        _cut(protected, repository="relative")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(_socket(protected))
        connection.send(b"\xff" * 100)
        with pytest.raises(UsageError, match="cannot be read"):
            pairing.answer(connection, 30)
    assert _cut(protected, roots=(f"{root}/logs",)).roots == (str(root),)
    assert pairing.states_of(_socket(protected), ("cs-123456",), 30).states == {"cs-123456": "gone"}
    assert protected.daemon is not None
    protected.daemon.send_signal(signal.SIGSTOP)
    try:
        question = pairing.Cut(training="cs-bbbbbbbb", repository="/x", time_ns=5)
        # Returns at once, or never.
        with (
            pairing.ask(_socket(protected), question) as connection,
            pytest.raises(Unreachable, match="did not answer in time"),
        ):
            pairing.answer(connection, 0.2)
    finally:
        protected.daemon.send_signal(signal.SIGCONT)

    def paired_ids() -> list[str]:
        with Repository.open(protected.repository) as repository:
            loaded, _ = repository.snapshots.load_all()
            return [one.pair.id for one in loaded if one.pair is not None]

    until("the snapshot", lambda: "cs-bbbbbbbb" in paired_ids())
    protected.stop()
    with pytest.raises(Unreachable, match="no daemon answers"):
        _cut(protected)


_HOLD = (
    "import sys; from ciuic.repository import Repository;"
    "r = Repository.open(sys.argv[1]); w = r.writer(wait_seconds=30).__enter__(); print('held', flush=True); sys.stdin.read()"
)


@pytest.mark.full
def test_a_user_may_have_snapshots_of_a_job_with_the_tags_of_the_job_alone(
    protected: Live, root: Path
) -> None:
    """A user's job has snapshots of roots of the user, with the job's tags and no others; the command waits until they are durable."""
    for directory in (protected.top.parent, protected.top, protected.top / "run"):
        directory.chmod(0o755)

    def asked(question: str) -> str:
        program = f"print(ask_files({_socket(protected)!r}, {question}).id, end='')"
        done = run_as(TRAINER, program, imports=_ASK)
        return done.stdout + done.stderr.strip().rpartition("\n")[2]

    wanted = f"roots=({str(root)!r},), message='m'"
    assert "does not belong to you" in asked(wanted)
    os.chown(root, TRAINER.uid, TRAINER.gid)
    assert "are to be named" in asked("roots=()")
    for tag in ("keep", "slurm-job=7,keep", "slurm-job="):
        assert "tags of its job alone" in asked(f"{wanted}, tags=({tag!r},)")
    taken = asked(f"{wanted}, tags=('slurm-job=7',)")
    assert _committed(protected, taken) is None
    with Repository.open(protected.repository) as repository:
        assert repository.snapshots.load(SnapshotId.parse(taken)).tags == ("slurm-job=7",)
