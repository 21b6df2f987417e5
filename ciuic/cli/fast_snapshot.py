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
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TextIO, cast

import tomli

from ciuic.cli import COMPLETE_VARIABLE
from ciuic.cli.shared.snapshot_command import BY_NAME, RESERVED_TAGS, telling_why
from ciuic.errors import CiuicError, Unreachable, error_of
from ciuic.protocol.socket_http import Answer, Connection

# As in ciuic.config.load and ciuic.config.model, which take 70 ms to import; a test compares both ways.
_FILES: Final = ("/etc/ciuic/ciuic.toml", "/etc/ciuric.conf")
_SOCKET_NAME: Final = "control.sock"
_RUNTIME_DIR: Final = "/run/ciuic"
# As in ControlClient. connect(2) to a Unix socket waits only where its queue of connections is full.
_CONNECT_SECONDS: Final = 30.0
# Status codes from here on are errors (RFC 9110).
_FIRST_ERROR: Final = 400


class Request(NamedTuple):
    """Request for a snapshot."""

    message: str = ""
    tags: tuple[str, ...] = ()
    hold: bool = False
    wait: bool = False

    def document(self) -> bytes:
        """Return the body of POST /v1/snapshots. Raises UnicodeEncodeError for text that is not UTF-8."""
        return json.dumps({**self._asdict(), "roots": []}, ensure_ascii=False).encode()


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Ask for the snapshot and return the exit status; None, with nothing done, where the whole program is needed."""
    request = parse(arguments)
    # JSON lines of progress and the candidates of shell completion are the whole program's to print.
    if request is None or "CIUIC_PROGRESS" in environment or COMPLETE_VARIABLE in environment:
        return None
    if request.wait and sys.stderr.isatty():
        # A terminal shows the progress.
        return None
    socket_path = find_socket(environment)
    try:
        # Both before the request is sent: from then on the whole program would ask for a second snapshot.
        body = request.document()
        if socket_path is None:
            return None
        connection = Connection(socket_path, connect_seconds=_CONNECT_SECONDS)
    except (CiuicError, UnicodeEncodeError):
        # Nothing was asked yet: the whole program says what is wrong.
        return None
    if not request.wait:
        return _ask(connection, request, body)

    with telling_why(socket_path):
        return _ask(connection, request, body)


def parse(arguments: Sequence[str]) -> Request | None:
    """Return the request for plain forms of the command; None for what only click understands or refuses."""
    if not arguments or arguments[0] != "snapshot":
        return None
    found: dict[str, Any] = {}
    rest = iter(arguments[1:])
    for word in rest:
        # By the whole word: `--tag=a`, `-mTEXT` and abbreviations are click's to take apart.
        option = BY_NAME.get(word)
        if option is None:
            return None
        if option.is_flag:
            found[option.field] = True
            continue
        value = next(rest, "")
        # What begins with a dash may be an option that somebody forgot the value before.
        if not value or value.startswith("-"):
            return None
        # A narrower rule than options.Tag's: what that may refuse is left to it, with its message.
        if option.field == "tags" and (
            value in RESERVED_TAGS or not value.replace("-", "a").replace("_", "a").isalnum()
        ):
            return None
        found[option.field] = (*found.get(option.field, ()), value) if option.repeats else value
    return Request(**found)


def find_socket(environment: Mapping[str, str]) -> str | None:
    """Return the daemon's socket; None where finding it takes the whole program."""
    # lexists, as in ciuic.config: a link that leads nowhere is a mistake to report, and not a file that is
    # not there.
    file = environment.get("CIUIC_CONFIG") or next(filter(os.path.lexists, _FILES), "")
    if not file:
        return f"{_RUNTIME_DIR}/{_SOCKET_NAME}"
    # A flat file has a parser of its own, and a refused file a message: both are the whole program's.
    if file.endswith(".conf") or (os.geteuid() == 0 and _others_may_write(file)):
        return None
    try:
        with open(file, "rb") as opened:
            document = tomli.load(opened)
    except (OSError, ValueError, RecursionError):
        return None
    # Values of a wrong type are a mistake that the whole program reports with its line.
    control, daemon = document.get("control", {}), document.get("daemon", {})
    if not isinstance(control, dict) or not isinstance(daemon, dict):
        return None
    found = control.get("socket")
    if found is None:
        runtime_dir = daemon.get("runtime_dir", _RUNTIME_DIR)
        found = f"{runtime_dir}/{_SOCKET_NAME}" if isinstance(runtime_dir, str) else None
    return found if isinstance(found, str) and found.startswith("/") else None


def _others_may_write(file: str) -> bool:
    """Return True if the whole program refuses this configuration for its owner or mode."""
    # Imported where root asks: jobs of other users take what they are given.
    from ciuic.system.ownership import find_flaw

    try:
        return find_flaw(file) is not None
    except OSError:
        return True


def _ask(connection: Connection, request: Request, body: bytes) -> int:
    try:
        with connection:
            # No time limit: a cut waits for the kernel's cached writes, and --wait for a first capture of the
            # whole tree.
            answer = connection.ask("POST", "/v1/snapshots", body, answer_seconds=None)
        state = _state(answer)
    except CiuicError as error:
        return _as_the_program_ends(error)
    except KeyboardInterrupt as error:
        _note("if it is cut, the daemon goes on capturing it")
        return _as_the_program_ends(error)
    snapshot, incomplete, left_out = str(state["id"]), state.get("incomplete"), state.get("left_out")
    try:
        sys.stdout.write(f"{snapshot}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # `| head` has read what it wanted: what is said on stderr, and the exit code, are for somebody else.
        _abandon(sys.stdout)
    except OSError as error:
        # Such as a full disk under stdout: not the repository's, for which explain() would suggest `ciuic
        # prune`.
        return _as_the_program_ends(CiuicError(f"the output could not be written: {error.strerror}"))
    if not request.wait:
        _note(f"{snapshot} is cut and being captured; `ciuic status` shows how far it is")
    # After the id is out: a script has it, whatever the exit code says about the rest.
    if incomplete or left_out:
        return _tell_what_is_missing(snapshot, incomplete or (), left_out or {}, waited=request.wait)
    return 0


def _note(text: str) -> None:
    """Print a line to stderr; that it cannot be written changes no exit code."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        _abandon(sys.stderr)


def _abandon(stream: TextIO) -> None:
    # Imports click (28 ms), which only those pay whose reader has left.
    from ciuic.cli.shared.messages import redirect_to_null

    redirect_to_null(stream)


def _state(answer: Answer) -> dict[str, Any]:
    """Return the snapshot's document, or raise the daemon's error as the class that has its exit code."""
    try:
        document = json.loads(answer.body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Unreachable(
            "the daemon's answer cannot be read", hint="restart the daemon, if it is of another version"
        )
    if answer.status >= _FIRST_ERROR:
        # A daemon of a newer version may send a code that this one does not know.
        code = cast("int", document.get("code"))
        raise error_of(code, str(document.get("error")), hint=str(document.get("hint", "")))
    return document


def _as_the_program_ends(error: BaseException) -> int:
    def fail() -> None:
        raise error

    return _guarded(fail)


def _guarded(act: Callable[[], None]) -> int:
    # Only here, where something is to be reported, is click imported (28 ms).
    from ciuic.cli.app import guarded
    from ciuic.cli.shared.session import Session

    return guarded(Session(), act)


def _tell_what_is_missing(
    snapshot: str, incomplete: Sequence[object], left_out: Mapping[str, object], *, waited: bool
) -> int:
    from ciuic.cli.commands.snapshot import tell_what_is_missing

    lines, roots = [str(line) for line in incomplete], {root: str(why) for root, why in left_out.items()}
    return _guarded(lambda: tell_what_is_missing(snapshot, lines, roots, waited=waited))
