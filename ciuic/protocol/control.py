"""Client of the daemon's control socket.

Guarantees: a call returns the daemon's typed answer, or raises the CiuicError that the daemon raised (same class, same exit
code), Unreachable when no daemon answers, NotPermitted when the socket may not be opened. Nothing is retried.
control_types.py defines the documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from ciuic.errors import CiuicError, Unreachable
from ciuic.protocol.control_types import (
    ErrorDocument,
    Event,
    FlushReport,
    HoldRequest,
    HoldState,
    PruneReport,
    ReloadReport,
    RootStatus,
    SnapshotState,
    StatusDocument,
)
from ciuic.protocol.socket_http import Answer, Connection
from ciuic.structs import decode_json, json_decoder

DEFAULT_SOCKET = Path("/run/ciuic/control.sock")
# Status codes from here on are errors (RFC 9110).
_FIRST_ERROR = 400
T = TypeVar("T")


class ControlClient:
    """Connection to the daemon behind ``socket_path``, as a context manager."""

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
        """Do nothing: each call has a connection of its own, so none is left open."""

    # -- calls

    def status(self) -> StatusDocument:
        """Return what the daemon, its roots and the repository are doing now."""
        return self._call("GET", "/v1/status", StatusDocument)

    def take_snapshot(
        self,
        *,
        message: str = "",
        tags: Sequence[str] = (),
        hold: bool = False,
        wait: bool = False,
        roots: Sequence[str] = (),
        before_end_seconds: float = 0.0,
        cause: str = "",
    ) -> SnapshotState:
        """Cut a snapshot now. On return the instant is fixed and has an id; with ``wait`` the snapshot is durable.

        With ``wait``, a capture that fails raises its error. Waiting has no time limit, because a first capture takes as long as
        reading the whole tree. ``before_end_seconds`` is the time until this machine ends, by ``cause``; 0: no end is known.
        """
        body = {"message": message, "tags": list(tags), "hold": hold, "wait": wait, "roots": list(roots)}
        if before_end_seconds:
            # Only where it is needed: an older daemon refuses fields that it does not know.
            body |= {"before_end_seconds": before_end_seconds, "cause": cause}
        # No timeout for the answer: a cut waits for the kernel's cached writes to reach the backing disk, which may be slow.
        return self._call("POST", "/v1/snapshots", SnapshotState, body, answer_seconds=None)

    def snapshot_state(self, snapshot_id: str) -> SnapshotState:
        """Return the state of a snapshot since its cut; NotFound for ids that neither this daemon nor the repository knows."""
        return self._call("GET", f"/v1/snapshots/{snapshot_id}", SnapshotState)

    def wait_snapshot(self, snapshot_id: str) -> SnapshotState:
        """Block until the snapshot is committed (returned) or has failed (its error is raised)."""
        return self._call("GET", f"/v1/snapshots/{snapshot_id}?wait=1", SnapshotState, answer_seconds=None)

    def flush(self, roots: Sequence[str] = ()) -> FlushReport:
        """Write back what the kernel has cached of these roots (none: all): the first step of a held snapshot."""
        # No timeout for the answer: the backing disk may be slow.
        return self._call("POST", "/v1/flush", FlushReport, {"roots": list(roots)}, answer_seconds=None)

    def hold(self, request: HoldRequest) -> HoldState:
        """Hold all roots of a snapshot; on return no changing operation is in flight. Ends by itself at its limit."""
        return self._call("POST", "/v1/holds", HoldState, msgspec.to_builtins(request))

    def cut_hold(self, token: str) -> SnapshotState:
        """Cut what is held. On return the instant, within the hold, is fixed and has an id; an error says that there is none."""
        return self._call("POST", f"/v1/holds/{token}", SnapshotState, {"cut": True})

    def release_hold(self, token: str) -> None:
        """End a hold without a cut. NotFound if it has ended."""
        self._call("POST", f"/v1/holds/{token}", dict, {"cut": False})

    def add_root(self, path: str) -> RootStatus:
        """Mount a root; on return it is mounted. Idempotent. The caller writes the configuration file."""
        # A worker may take 30 s to be ready, which is the default timeout here.
        return self._call("POST", "/v1/roots", RootStatus, {"path": path}, answer_seconds=None)

    def remove_root(self, path: str) -> None:
        """Unmount a root; on return nothing is mounted there. Idempotent; files and snapshots stay as they are."""
        # No timeout for the answer: the daemon gives the worker a minute to detach the mount.
        self._call("DELETE", "/v1/roots", dict, {"path": path}, answer_seconds=None)

    def forget_trainer(self, trainer: str) -> None:
        """Stop watching a trainer, given by name or pid, and end the alerts about it. NotFound."""
        self._call("DELETE", "/v1/trainers", dict, {"trainer": trainer})

    def prune(self, *, dry_run: bool = False) -> PruneReport:
        """Apply the retention policy in the daemon, which avoids competing with it for the repository's lock."""
        # No timeout for the answer: the daemon waits for a running capture first, and then walks the
        # repository.
        return self._call("POST", "/v1/prune", PruneReport, {"dry_run": dry_run}, answer_seconds=None)

    def reload(self) -> ReloadReport:
        """Have the daemon read its configuration again; ConfigError (and no change) if it is not valid.

        On return every added root has been mounted, or the report says why not.
        """
        # No timeout for the answer: it comes when the first attempt to mount each added root has ended.
        return self._call("POST", "/v1/reload", ReloadReport, {}, answer_seconds=None)

    def stop(self) -> None:
        """Asks the daemon to stop cleanly; returns when it has begun to."""
        self._call("POST", "/v1/stop", dict, {})

    def metrics(self) -> str:
        """Return the metrics as Prometheus text."""
        return self._request("GET", "/metrics").body.decode()

    def events(self) -> Iterator[Event]:
        """Yield state changes as they happen, until the daemon stops or the caller closes the generator."""
        decoder = json_decoder(Event)
        with self._connect() as connection:
            status, lines = connection.lines("/v1/events")
            if status >= _FIRST_ERROR:
                raise _refusal(Answer(status, b"\n".join(lines)))
            for line in lines:
                # Other lines are the blank ones between events, and comments of the stream (`: listening`).
                if line.startswith(b"data:"):
                    yield decoder.decode(line[5:])

    def is_running(self) -> bool:
        """Return whether a daemon answers. NotPermitted when the socket exists and may not be opened."""
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
            return decode_json(response.body, reply)
        except msgspec.DecodeError as error:
            raise CiuicError(
                f"the daemon's answer to {method} {path} cannot be read: {error}",
                hint="daemon and command have different versions; restart the daemon",
            ) from error

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        answer_seconds: float | None = -1.0,
    ) -> Answer:
        # None has a meaning of its own, to wait for ever, so a negative number stands for the client's
        # timeout.
        seconds = (
            self._timeout_seconds if answer_seconds is not None and answer_seconds < 0 else answer_seconds
        )
        content = None if body is None else msgspec.json.encode(body)
        # A connection for each request, which is never repeated: a request may have been carried out without an answer.
        with self._connect() as connection:
            answer = connection.ask(method, path, content, answer_seconds=seconds)
        if answer.status >= _FIRST_ERROR:
            raise _refusal(answer)
        return answer

    def _connect(self) -> Connection:
        return Connection(str(self.socket), connect_seconds=self._timeout_seconds)


def _refusal(answer: Answer) -> CiuicError:
    """Return the daemon's error as the class that has its exit code."""
    try:
        return decode_json(answer.body, ErrorDocument).raised()
    except msgspec.DecodeError:
        return CiuicError(f"the daemon answered {answer.status}")
