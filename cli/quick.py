"""``ciuic snapshot`` as jobs and timers run it, without importing the program around it.

A job that takes a snapshot between two steps waits for the command, and of its time the interpreter's start is 12 ms, click's
import 28, the configuration's 70, all of processor time, while the daemon commits in 30. So what is asked for
often, and needs no help, no progress and no colours, is asked here; everything else is the whole program's (app.py).

Guarantees: either None and nothing was done, or what the whole program would have done and printed, with its exit codes.
Of the configuration only where the daemon listens is looked at.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import tomli

from ciuic.errors import BY_EXIT_CODE, CiuicError, Unreachable
from ciuic.ownership import find_flaw
from ciuic.socket_http import Answer, Connection

_FILES: Final = ("/etc/ciuic/ciuic.toml", "/etc/ciuric.conf")
_SOCKET_NAME: Final = "control.sock"
_RUNTIME_DIR: Final = "/run/ciuic"
_CONNECT_SECONDS: Final = 30.0
_FIRST_ERROR: Final = 400
_FLAGS: Final = ("--wait", "--hold")


class Request(NamedTuple):
    """What is asked of the daemon."""

    message: str = ""
    tags: tuple[str, ...] = ()
    hold: bool = False
    wait: bool = False

    def document(self) -> bytes:
        """As the body of POST /v1/snapshots. UnicodeEncodeError for what is no text."""
        return json.dumps({**self._asdict(), "roots": []}, ensure_ascii=False).encode()


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """The exit status; None for what the whole program must do, and nothing was done."""
    request = parse(arguments)
    if request is None or "CIUIC_PROGRESS" in environment or "_CIUIC_COMPLETE" in environment:
        return None
    if request.wait and sys.stderr.isatty():
        return None  # somebody watches the progress
    socket_path = find_socket(environment)
    try:
        body = request.document()
        if socket_path is None:
            return None
        connection = Connection(socket_path, connect_seconds=_CONNECT_SECONDS)
    except (CiuicError, UnicodeEncodeError):
        return None  # nothing was asked yet: the whole program says what is wrong
    for number in (signal.SIGTERM, signal.SIGHUP):  # as app.run has it
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    return _ask(connection, request, body)


def parse(arguments: Sequence[str]) -> Request | None:
    """The request in its plain forms; None for everything else that click would understand or refuse."""
    if not arguments or arguments[0] != "snapshot":
        return None
    found = Request()
    rest = iter(arguments[1:])
    for word in rest:
        if word in _FLAGS:
            found = found._replace(wait=True) if word == "--wait" else found._replace(hold=True)
            continue
        value = next(rest, "") if word in ("-m", "--message", "--tag") else ""
        # What begins with a dash may be an option that somebody forgot the value before.
        if not value or value.startswith("-"):
            return None
        if word == "--tag" and not value.replace("-", "a").replace("_", "a").isalnum():
            return None
        found = (
            found._replace(tags=(*found.tags, value)) if word == "--tag" else found._replace(message=value)
        )
    return found


def find_socket(environment: Mapping[str, str]) -> str | None:
    """Where the daemon listens; None when it takes the whole program to find out."""
    file = environment.get("CIUIC_CONFIG") or next(filter(os.path.lexists, _FILES), "")
    if not file:
        return f"{_RUNTIME_DIR}/{_SOCKET_NAME}"
    if file.endswith(".conf") or (os.geteuid() == 0 and _others_may_write(file)):
        return None
    try:
        with open(file, "rb") as opened:
            document = tomli.load(opened)
    except (OSError, ValueError, RecursionError):
        return None
    control, daemon = document.get("control", {}), document.get("daemon", {})
    if not isinstance(control, dict) or not isinstance(daemon, dict):
        return None
    found = control.get("socket")
    if found is None:
        runtime_dir = daemon.get("runtime_dir", _RUNTIME_DIR)
        found = f"{runtime_dir}/{_SOCKET_NAME}" if isinstance(runtime_dir, str) else None
    return found if isinstance(found, str) and found.startswith("/") else None


def _others_may_write(file: str) -> bool:
    """Whether the whole program refuses this configuration."""
    try:
        return find_flaw(file) is not None
    except OSError:
        return True


def _ask(connection: Connection, request: Request, body: bytes) -> int:
    try:
        with connection:
            answer = connection.ask("POST", "/v1/snapshots", body, answer_seconds=None)
        state = _state(answer)
    except CiuicError as error:
        return _as_the_program_ends(error)
    except KeyboardInterrupt as error:
        sys.stderr.write("if it is cut, the daemon goes on capturing it\n")
        return _as_the_program_ends(error)
    snapshot, incomplete, left_out = str(state["id"]), state.get("incomplete"), state.get("left_out")
    try:
        sys.stdout.write(f"{snapshot}\n")
        sys.stdout.flush()
        if not request.wait:
            sys.stderr.write(f"{snapshot} is cut and being captured; `ciuic status` shows how far it is\n")
    except OSError as error:
        return _as_the_program_ends(error)
    if state.get("retaken"):
        _tell_if_retaken(snapshot, str(state.get("time")), str(state["retaken"]))
    if incomplete or left_out:
        return _tell_what_is_missing(snapshot, incomplete or (), left_out or {}, waited=request.wait)
    return 0


def _state(answer: Answer) -> dict[str, Any]:
    """The snapshot's document. The error that the daemon answered with, as the class that has its exit code."""
    try:
        document = json.loads(answer.body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Unreachable(
            "the daemon's answer cannot be read", hint="restart the daemon, if it is of another version"
        )
    if answer.status >= _FIRST_ERROR:
        kind = BY_EXIT_CODE.get(cast("int", document.get("code")), CiuicError)
        raise kind(str(document.get("error")), hint=str(document.get("hint", "")))
    return document


def _as_the_program_ends(error: BaseException) -> int:
    def fail() -> None:
        raise error

    return _guarded(fail)


def _guarded(act: Callable[[], None]) -> int:
    from ciuic.cli.app import guarded
    from ciuic.cli.session import Session

    return guarded(Session(), act)


def _tell_if_retaken(snapshot: str, time: str, reason: str) -> None:
    from ciuic.cli.snapshot_command import tell_if_retaken

    _guarded(lambda: tell_if_retaken(snapshot, time, reason))


def _tell_what_is_missing(
    snapshot: str, incomplete: Sequence[object], left_out: Mapping[str, object], *, waited: bool
) -> int:
    from ciuic.cli.snapshot_command import tell_what_is_missing

    lines, roots = [str(line) for line in incomplete], {root: str(why) for root, why in left_out.items()}
    return _guarded(lambda: tell_what_is_missing(snapshot, lines, roots, waited=waited))
