"""The client of the daemon's control socket: what a command says to a running daemon.

Guarantees: a call returns the daemon's typed answer, or raises the CiuicError that the daemon raised (same class, same
exit code), Unreachable when nobody answers, NotPermitted when the socket may not be opened. Nothing is retried.
Left to others: what the documents mean (control_types.py), what the daemon does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from ciuic.control_types import (
    ErrorDocument,
    Event,
    PruneReport,
    ReloadReport,
    RootStatus,
    SnapshotState,
    StatusDocument,
)
from ciuic.errors import BY_EXIT_CODE, CiuicError, Unreachable
from ciuic.socket_http import Answer, Connection

DEFAULT_SOCKET = Path("/run/ciuic/control.sock")
_FIRST_ERROR = 400
T = TypeVar("T")


class ControlClient:
    """The daemon behind ``socket_path``. A context manager."""

    def __init__(self, socket_path: Path | str = DEFAULT_SOCKET, *, timeout_seconds: float = 30.0) -> None:
        self.socket = Path(socket_path)
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Each call has had a connection of its own: nothing is left open."""

    # -- calls

    def status(self) -> StatusDocument:
        """What the daemon, its roots and the repository are doing now."""
        return self._call("GET", "/v1/status", StatusDocument)

    def take_snapshot(
        self,
        *,
        message: str = "",
        tags: Sequence[str] = (),
        hold: bool = False,
        wait: bool = False,
        roots: Sequence[str] = (),
    ) -> SnapshotState:
        """Cuts now. On return the instant is fixed and has an id; with ``wait`` the snapshot is durable.

        A capture that failed raises its error when waited for. Waiting has no time limit: a first capture takes as
        long as reading the whole tree.
        """
        body = {"message": message, "tags": list(tags), "hold": hold, "wait": wait, "roots": list(roots)}
        # A cut waits for the kernel's cached writes to reach the backing disk, which may be slow; only connecting is timed.
        return self._call("POST", "/v1/snapshots", SnapshotState, body, answer_seconds=None)

    def snapshot_state(self, snapshot_id: str) -> SnapshotState:
        """A snapshot since its cut; NotFound for ids that neither this daemon nor the repository knows."""
        return self._call("GET", f"/v1/snapshots/{snapshot_id}", SnapshotState)

    def wait_snapshot(self, snapshot_id: str) -> SnapshotState:
        """Blocks until the snapshot is committed (returned) or has failed (its error is raised)."""
        return self._call("GET", f"/v1/snapshots/{snapshot_id}?wait=1", SnapshotState, answer_seconds=None)

    def add_root(self, path: str) -> RootStatus:
        """Mounts a root now; on return it is mounted. Idempotent. The configuration file is the caller's to write."""
        return self._call("POST", "/v1/roots", RootStatus, {"path": path}, answer_seconds=None)

    def remove_root(self, path: str) -> None:
        """Unmounts a root now; on return nothing is mounted there. Idempotent; files and snapshots stay as they are."""
        self._call("DELETE", "/v1/roots", dict, {"path": path}, answer_seconds=None)

    def forget_trainer(self, trainer: str) -> None:
        """By name or pid: not watched any more, and what alerts say of it goes. NotFound."""
        self._call("DELETE", "/v1/trainers", dict, {"trainer": trainer})

    def prune(self, *, dry_run: bool = False) -> PruneReport:
        """Applies the retention policy in the daemon, which then need not be fought for the repository's lock."""
        return self._call("POST", "/v1/prune", PruneReport, {"dry_run": dry_run}, answer_seconds=None)

    def reload(self) -> ReloadReport:
        """Have the daemon read its configuration again; ConfigError (and no change) if it is not valid.

        On return every added root has been mounted, or the report says why not.
        """
        return self._call("POST", "/v1/reload", ReloadReport, {}, answer_seconds=None)

    def stop(self) -> None:
        """Asks the daemon to stop cleanly; returns when it has begun to."""
        self._call("POST", "/v1/stop", dict, {})

    def metrics(self) -> str:
        """Prometheus text."""
        return self._request("GET", "/metrics").body.decode()

    def events(self) -> Iterator[Event]:
        """State changes as they happen, until the daemon stops or the caller closes the generator."""
        decoder = msgspec.json.Decoder(Event)
        with self._connect() as connection:
            status, lines = connection.lines("/v1/events")
            if status >= _FIRST_ERROR:
                raise _refusal(Answer(status, b"\n".join(lines)))
            for line in lines:
                if line.startswith(b"data:"):
                    yield decoder.decode(line[5:])

    def is_running(self) -> bool:
        """Whether a daemon answers. NotPermitted when the socket is there but may not be opened."""
        try:
            self.status()
        except Unreachable:
            return False
        return True

    # -- transport

    def _call(
        self,
        method: str,
        path: str,
        reply: type[T],
        body: dict[str, Any] | None = None,
        *,
        answer_seconds: float | None = -1.0,
    ) -> T:
        response = self._request(method, path, body, answer_seconds=answer_seconds)
        try:
            return msgspec.json.decode(response.body, type=reply)
        except msgspec.DecodeError as error:
            raise CiuicError(
                f"the daemon's answer to {method} {path} cannot be read: {error}",
                hint="daemon and command are of different versions; restart the daemon",
            ) from error

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        answer_seconds: float | None = -1.0,
    ) -> Answer:
        seconds = (
            self._timeout_seconds if answer_seconds is not None and answer_seconds < 0 else answer_seconds
        )
        content = None if body is None else msgspec.json.encode(body)
        with self._connect() as connection:
            answer = connection.ask(method, path, content, answer_seconds=seconds)
        if answer.status >= _FIRST_ERROR:
            raise _refusal(answer)
        return answer

    def _connect(self) -> Connection:
        return Connection(str(self.socket), connect_seconds=self._timeout_seconds)


def _refusal(answer: Answer) -> CiuicError:
    """The error that the daemon answered with, as the class that has its exit code."""
    try:
        document = msgspec.json.decode(answer.body, type=ErrorDocument)
    except msgspec.DecodeError:
        return CiuicError(f"the daemon answered {answer.status}")
    return BY_EXIT_CODE.get(document.code, CiuicError)(document.error, hint=document.hint)
