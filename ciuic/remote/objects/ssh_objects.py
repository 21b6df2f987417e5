"""Objects of a directory on another machine, reached by the system's own ``ssh`` with its configuration, keys and agent.

``ssh HOST ciuic remote serve --stdio DIR`` is started when the first request comes, and again after a connection that
was lost; all threads share one connection. Guarantees: a request that was lost with its connection is asked again, a few
times; a reply is bounded by what was asked for, whatever the server sends; nothing that the server says is shown but one
line of printable text. A server that sends nothing for `_SILENT_SECONDS` while a request waits counts as gone.

References:
    ssh(1), EXIT STATUS: 255 if an error occurred in ssh itself
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import CiuicError, Damaged, UsageError
from ciuic.remote.objects.model import (
    MAX_OBJECT_BYTES,
    NonsenseReply,
    ObjectInfo,
    RemoteRefused,
    RemoteUnreachable,
    TooLargeObject,
    check_name,
    is_name,
)
from ciuic.remote.objects.pipe_protocol import (
    ALIVE,
    BODY,
    MAGIC,
    MAX_NOISE_BYTES,
    MESSAGE,
    PAGE,
    VERSION,
    Reply,
    Request,
    decode_reply,
    pieces,
    raised,
    read_exactly,
    read_frame,
    write_frame,
)
from ciuic.remote.objects.urls import RemoteUrl, StoreSettings
from ciuic.repository.identity import Bytes
from ciuic.system.poll import readable

COMMAND_VARIABLE: Final = "CIUIC_SSH_COMMAND"
"""Environment variable with the ``ssh`` to use and its options, where the configuration has none."""
PROGRAM_VARIABLE: Final = "CIUIC_SSH_PROGRAM"
"""The same for ``ciuic`` on the other host."""
SSH_OPTIONS: Final = (
    "-T",
    # The server gets no use of the keys here.
    "-a",
    "-x",
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
    *("-o", "ConnectTimeout=20"),
)
_SILENT_SECONDS: Final = 60.0
_HELLO_SECONDS: Final = 60.0
_PROMPT_SECONDS: Final = 300.0
"""Time for a person to type a passphrase."""
_TRIES: Final = 5
_FIRST_PAUSE_SECONDS: Final = 0.2
_PIPE_BYTES: Final = 1 << 20
_MAX_STDERR_BYTES: Final = 4096
_MAX_SHOWN: Final = 300
_REFUSALS: Final = (
    "permission denied",
    "host key verification failed",
    "no matching",
    "bad configuration option",
    "bad permissions",
    "too many authentication failures",
    "unprotected private key",
    "remote host identification has changed",
)
"""Words of ssh for what no other try mends."""
_PASSING: Final = ("kex_exchange_identification", "connection closed by", "connection reset by")
"""Words of ssh when sshd does not admit more connections for the moment (MaxStartups)."""
_NO_PROGRAM: Final = (126, 127)
"""Exit codes of a shell that cannot run a program, or does not find it."""


class _Lost(RemoteUnreachable):
    """The connection ended; the request may have been done."""


class Server(NamedTuple):
    """Far end of a connection, as it describes itself."""

    program: str
    """Version of ciuic there."""
    directory: str
    """Directory that it serves, which a forced command may have chosen."""
    append_only: bool
    """It deletes and replaces nothing."""


class SshObjects:
    """Objects below a directory of another machine."""

    def __init__(
        self,
        url: RemoteUrl,
        settings: StoreSettings,
        *,
        make: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Prepare; nothing is started before the first request.

        Args:
            url: Place.
            settings: ``ssh_command`` and ``ssh_program``.
            make: Have the server make the directory where it is missing.
            environment: Environment of ssh.

        Raises:
            UsageError: the command cannot be parsed.
        """
        self._url = url
        self._make = make
        self._environment = dict(environment)
        text = settings.ssh_command or environment.get(COMMAND_VARIABLE, "") or "ssh"
        try:
            command = shlex.split(text)
        except ValueError as error:
            raise UsageError(f"the command for ssh cannot be parsed: {error}") from None
        # Without a terminal nobody answers a prompt. ssh itself asks on the terminal, not on stdin.
        self._may_ask = sys.stdin is not None and sys.stdin.isatty()
        asks = () if self._may_ask else ("-o", "BatchMode=yes")
        program = settings.ssh_program or environment.get(PROGRAM_VARIABLE, "") or "ciuic"
        directory = url.prefix
        # The shell there replaces an unquoted ~ by the home directory.
        quoted = f"~/{shlex.quote(directory[3:])}" if directory.startswith("/~/") else shlex.quote(directory)
        self._argv = (
            *command,
            *SSH_OPTIONS,
            *asks,
            *url.ssh_options,
            f"{program} remote serve --stdio {quoted}",
        )
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._is_closed = False

    @property
    def url(self) -> str:
        """URL of the directory."""
        return str(self._url)

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object, in place of one that is there."""
        check_name(name)
        self._ask(Request("put", name), name, body=data)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free; False if it is taken."""
        check_name(name)
        return self._ask(Request("create", name), name, body=[data])[0].created

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        check_name(name)
        return self._ask(Request("get", name), name, limit_bytes=MAX_OBJECT_BYTES)[1]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length), cut at the end of the object."""
        check_name(name)
        found: list[Bytes] = []
        for several in _requests_of(ranges):
            wanted = sum(length for _, length in several)
            reply, body = self._ask(Request("ranges", name, ranges=several), name, limit_bytes=wanted)
            if (
                len(reply.lengths) != len(several)
                or sum(reply.lengths) != len(body)
                or any(
                    not 0 <= got <= length for got, (_, length) in zip(reply.lengths, several, strict=True)
                )
            ):
                raise NonsenseReply(f"cannot read {name}: the server sent other ranges than it was asked for")
            view, at = memoryview(body), 0
            for got in reply.lengths:
                found.append(view[at : at + got])
                at += got
        return found

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        check_name(name)
        length = min(length, MAX_OBJECT_BYTES)
        reply, body = self._ask(Request("tail", name, length=length), name, limit_bytes=length)
        if reply.size_bytes < 0 or len(body) != min(length, reply.size_bytes):
            raise NonsenseReply(f"cannot read {name}: the server sent another end than it was asked for")
        return reply.size_bytes, body

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; None if there is none."""
        check_name(name)
        reply, _ = self._ask(Request("info", name), name)
        if reply.size_bytes < 0:
            raise NonsenseReply(
                f"cannot look at {name}: the server says that it has {reply.size_bytes} bytes"
            )
        return ObjectInfo(name, reply.size_bytes, reply.modified_ns) if reply.found else None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``, ascending by the bytes of their names."""
        last = after
        while True:
            reply, _ = self._ask(Request("list", prefix, after=last), prefix)
            for name, size_bytes, modified_ns in reply.infos:
                if not is_name(name) or not name.startswith(prefix) or name <= last or size_bytes < 0:
                    raise NonsenseReply(
                        f"cannot list {prefix}: the server sent names that were not asked for"
                    )
                last = name
                yield ObjectInfo(name, size_bytes, modified_ns)
            if len(reply.infos) < PAGE:
                return

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects, and directories that are empty then."""
        several: list[str] = []
        for name in names:
            check_name(name)
            several.append(name)
            if len(several) == PAGE:
                self._ask(Request("delete", names=several), "")
                several = []
        if several:
            self._ask(Request("delete", names=several), "")

    def server(self) -> Server:
        """Return what the server says of itself.

        Raises:
            RemoteUnreachable: it did not answer.
            RemoteRefused: ssh or the server refused.
        """
        return self._connected().server

    def reconnect(self) -> None:
        """Make a new connection for the requests that begin from now on; those that are under way end on the old one."""
        with self._lock:
            old, self._connection = self._connection, None
        if old is not None:
            old.retire()

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            old, self._connection, self._is_closed = self._connection, None, True
        if old is not None:
            old.close()

    def _ask(
        self, request: Request, name: str, *, body: Sequence[Bytes] = (), limit_bytes: int = 0
    ) -> tuple[Reply, bytes]:
        """Return a reply and its body; a request that is lost with its connection is asked again."""
        parts = pieces(body)
        request.body_bytes = sum(len(part) for part in parts)
        if request.body_bytes > MAX_OBJECT_BYTES:
            raise TooLargeObject(name, request.body_bytes)
        for tries_left in reversed(range(_TRIES)):
            try:
                reply, answer = self._connected().ask(request, parts, limit_bytes)
                break
            except _Lost:
                if not tries_left:
                    raise
                # At random: many clients at once are more than sshd admits (MaxStartups).
                time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (_TRIES - tries_left) * random.uniform(0.5, 1.5))
        if reply.error:
            raise raised(reply, name)
        return reply, answer

    def _connected(self) -> _Connection:
        with self._lock:
            if self._is_closed:
                raise RemoteUnreachable(f"the connection to {self._url} was closed")
            if self._connection is None or self._connection.has_ended:
                self._connection = None
                hello_seconds = _PROMPT_SECONDS if self._may_ask else _HELLO_SECONDS
                connection = _Connection(self._argv, self._environment, self._url, hello_seconds)
                connection.open(make=self._make)
                self._connection = connection
            return self._connection


def _requests_of(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges for one request each; a range that is longer than any object is cut to that."""
    several: list[tuple[int, int]] = []
    wanted = 0
    for offset, length in ranges:
        length = min(length, MAX_OBJECT_BYTES)
        if several and (len(several) == PAGE or wanted + length > MAX_OBJECT_BYTES):
            yield several
            several, wanted = [], 0
        several.append((offset, length))
        wanted += length
    if several:
        yield several


class _Call:
    """Request that waits for its reply."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.done = threading.Event()
        self.reply: Reply | None = None
        self.parts: list[bytes] = []
        self.missing = 0
        self.error: CiuicError | None = None


class _Connection:
    """Process of ssh, a thread that reads its replies, and the requests that wait for them."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], url: RemoteUrl, hello_seconds: float
    ) -> None:
        self._url = url
        self._hello_seconds = hello_seconds
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                # Not the caller's: it may belong to another user, or be on a mount that dies.
                cwd="/",
                bufsize=0,
            )
        except OSError as error:
            raise RemoteRefused(
                f"cannot run {argv[0]}: {error.strerror or error}",
                hint="an ssh:// remote needs the OpenSSH client on this machine",
            ) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._write_fd = self._process.stdin.fileno()
        self._read_fd = self._process.stdout.fileno()
        for fd in (self._write_fd, self._read_fd):
            # Fewer calls for each frame. The limit of a user's pipes may be reached.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._sending = threading.Lock()
        self._sending_body = threading.Lock()
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._numbers = 0
        self._failure: CiuicError | None = None
        self._retired = False
        self._was_open = False
        self.server = Server("", "", False)
        self._heard = time.monotonic()
        self._stderr = bytearray()
        self._listener = threading.Thread(target=self._read_stderr, name="ssh stderr", daemon=True)
        self._listener.start()
        self._reader = threading.Thread(target=self._read_replies, name="ssh replies", daemon=True)

    @property
    def has_ended(self) -> bool:
        """True if no more requests can be sent."""
        return self._failure is not None

    def open(self, *, make: bool) -> None:
        """Wait for the server, and agree on the version.

        Raises:
            RemoteUnreachable: it did not answer.
            RemoteRefused: ssh or the server refused.
        """
        try:
            self._skip_noise()
        except CiuicError as error:
            self._fail(error)
            self._clean_up()
            raise
        self._heard = time.monotonic()
        self._reader.start()
        reply, _ = self.ask(Request("open", length=VERSION, make=make), [], 0)
        if reply.error:
            refused = raised(reply, "")
            self._fail(refused)
            raise refused
        self.server = Server(reply.program, reply.directory, reply.append_only)
        self._was_open = True

    def ask(self, request: Request, parts: Sequence[memoryview], limit_bytes: int) -> tuple[Reply, bytes]:
        """Send a request and wait for the reply.

        Raises:
            _Lost: the connection ended.
        """
        call = _Call(limit_bytes)
        with self._lock:
            if self._failure is not None:
                raise self._failure.anew()
            if not self._calls:
                self._heard = time.monotonic()
            self._numbers += 1
            number = self._numbers
            self._calls[number] = call
        try:
            with self._sending_body if parts else contextlib.nullcontext():
                self._send(number, MESSAGE, msgspec.msgpack.encode(request))
                for part in parts:
                    self._send(number, BODY, part)
        except OSError:
            # The reader finds out why.
            pass
        call.done.wait()
        if call.error is not None:
            raise call.error.anew()
        assert call.reply is not None
        return call.reply, call.parts[0] if len(call.parts) == 1 else b"".join(call.parts)

    def retire(self) -> None:
        """End once no request is under way."""
        with self._lock:
            self._retired = True
            idle = not self._calls
        if idle:
            self.close()

    def close(self) -> None:
        """End at once; requests that are under way fail."""
        self._fail(_Lost(f"the connection to {self._url} was closed"))

    def _send(self, number: int, kind: int, payload: Bytes) -> None:
        with self._sending:
            if self._failure is not None:
                raise BrokenPipeError
            write_frame(self._write_fd, number, kind, payload)

    def _skip_noise(self) -> None:
        """Read until `MAGIC`: a login shell may print something first."""
        deadline = time.monotonic() + self._hello_seconds
        seen = bytearray()
        while not seen.endswith(MAGIC):
            if not readable(self._read_fd, max(0.0, deadline - time.monotonic())):
                self._process.kill()
                raise _Lost(f"{self._url} did not answer within {self._hello_seconds:.0f} seconds")
            # One byte at a time: what follows is the reader's.
            byte = os.read(self._read_fd, 1)
            if not byte:
                raise self._reason()
            seen += byte
            if len(seen) > MAX_NOISE_BYTES:
                self._process.kill()
                raise RemoteRefused(
                    f"{self._url}: the login shell there prints too much before the command runs",
                    hint="a shell without a terminal has to be quiet: look at .bashrc there",
                )

    def _read_replies(self) -> None:
        try:
            while (frame := read_frame(self._read)) is not None:
                self._heard = time.monotonic()
                if frame.kind != ALIVE:
                    self._take(frame.number, frame.kind, frame.payload)
            self._fail(self._reason())
        except Damaged as error:
            self._fail(_Lost(f"{self._url}: {error.message}"))
        except CiuicError as error:
            self._fail(error)
        except Exception as error:
            # A defect must not leave requests waiting for ever.
            self._fail(_Lost(f"{self._url}: {error!r}"))
            raise
        finally:
            # In this order: after it nothing is written.
            self._fail(_Lost(f"the connection to {self._url} ended"))
            self._clean_up()

    def _take(self, number: int, kind: int, payload: bytes) -> None:
        """Take a frame of the reply to the request of this number.

        Raises:
            NonsenseReply: no such frame was to come.
        """
        call = self._calls.get(number)
        if call is None or (kind == BODY) != (call.reply is not None):
            raise NonsenseReply(f"{self._url} sent a reply that nobody waits for")
        if kind == MESSAGE:
            call.reply = decode_reply(payload)
            call.missing = call.reply.body_bytes
            if not 0 <= call.missing <= call.limit_bytes:
                raise NonsenseReply(
                    f"{self._url} sends {call.missing} bytes, asked for were {call.limit_bytes}"
                )
        else:
            if not 0 < len(payload) <= call.missing:
                raise NonsenseReply(f"{self._url} sent more than it announced")
            call.parts.append(payload)
            call.missing -= len(payload)
        if call.missing:
            return
        with self._lock:
            del self._calls[number]
            last = self._retired and not self._calls
        call.done.set()
        if last:
            self.close()

    def _read(self, length: int) -> bytes:
        """Return so many bytes, fewer at the end."""
        return read_exactly(self._read_fd, length, self._is_awaited)

    def _is_awaited(self, _: float) -> bool:
        # Since the last whole frame: one that comes byte by byte is as good as none.
        if self._calls and time.monotonic() - self._heard > _SILENT_SECONDS:
            raise _Lost(f"{self._url} was silent for {_SILENT_SECONDS:.0f} seconds")
        return True

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        # A process of ssh that others share (ControlPersist) keeps it open.
        with self._process.stderr as stderr:
            while part := os.read(stderr.fileno(), _MAX_STDERR_BYTES):
                self._stderr += part
                del self._stderr[:-_MAX_STDERR_BYTES]

    def _end_process(self) -> int:
        """Wait for the end of the process, which is killed where it takes long, and return its status."""
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _reason(self) -> CiuicError:
        """Return why the stream ended."""
        code = self._end_process()
        self._listener.join(1)
        lines = bytes(self._stderr).decode("utf-8", "replace").strip().splitlines()
        said = (
            "".join(char if char.isprintable() else " " for char in lines[-1])[:_MAX_SHOWN] if lines else ""
        )
        what = f"{self._url}: {said}" if said else f"{self._url}: ssh ended with status {code}"
        text = bytes(self._stderr).decode("utf-8", "replace").lower()
        if code == 255 and any(words in text for words in _REFUSALS):
            return RemoteRefused(
                what, hint="try it by hand: ssh with the same user and host has to work without a prompt"
            )
        if self._was_open or code < 0 or (code == 255 and any(words in text for words in _PASSING)):
            return _Lost(what)
        if code == 255:
            return RemoteUnreachable(what)
        if code in _NO_PROGRAM:
            return RemoteRefused(
                f"{what}: ciuic does not run on the server",
                hint='install ciuic there, or name it: ssh_program = "/opt/ciuic/bin/ciuic"',
            )
        return RemoteRefused(what)

    def _fail(self, failure: CiuicError) -> None:
        """End the connection and every request that waits."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            calls, self._calls = list(self._calls.values()), {}
        # A write or read that waits ends with the process.
        with contextlib.suppress(OSError):
            self._process.terminate()
        for call in calls:
            call.error = failure
            call.done.set()

    def _clean_up(self) -> None:
        """Reap the process and close its pipes, once nothing more is read."""
        self._process.terminate()
        self._end_process()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._sending:
            self._process.stdin.close()
        self._process.stdout.close()
