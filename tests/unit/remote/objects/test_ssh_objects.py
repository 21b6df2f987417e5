"""Objects over ssh: connections that are lost, keys that may only add, servers that lie, and shells that talk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import remote_recipe as recipe
from support import slow_line
from support.object_servers import free_ports
from support.ssh_server import SshServer

from ciuic.cli.app import cli
from ciuic.errors import CiuicError, Damaged, UsageError
from ciuic.remote.host_status import StatusReporter, read_statuses
from ciuic.remote.objects import pipe_server, ssh_objects
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.objects.model import (
    NonsenseReply,
    NoSuchObject,
    ObjectInfo,
    RemoteRefused,
    RemoteUnreachable,
    TooLargeObject,
)
from ciuic.remote.objects.pipe_protocol import (
    BODY,
    HEAD,
    MAGIC,
    MESSAGE,
    VERSION,
    Reply,
    Request,
    decode_reply,
    read_frame,
)
from ciuic.remote.objects.pipe_server import serve
from ciuic.remote.objects.ssh_objects import SshObjects
from ciuic.remote.objects.urls import StoreSettings, parse_url
from ciuic.remote.sealing.sealer import Sealer

_KILLS = 5


def children_of(pid: int) -> list[int]:
    """Return the processes below this one, this one's own threads' children included."""
    done = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False, timeout=30
    )
    found = [int(one) for one in done.stdout.split()]
    return found + [below for one in found for below in children_of(one)]


def servers_of(directory: str) -> list[int]:
    """Return the processes that serve a directory."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            try:
                arguments = (one / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--stdio" in arguments and os.fsencode(directory) in arguments:
                found.append(int(one.name))
    return found


@pytest.mark.parametrize("side", ["client", "server"])
def test_connections_that_are_killed_lose_nothing(ssh_server: SshServer, side: str) -> None:
    """While ssh or the server is killed again and again, what was stored is read back, and each name has one creator."""
    url = ssh_server.new_url()
    directory = parse_url(url).prefix
    clients = [ssh_server.connect(url) for _ in range(2)]
    clients[0].put("first", [b"1"])
    done = threading.Event()
    kills = 0

    def kill() -> None:
        nonlocal kills
        while not done.wait(0.7):
            pids = servers_of(directory) if side == "server" else children_of(os.getpid())
            for pid in pids:
                command = Path(f"/proc/{pid}/comm")
                try:
                    if side == "server" or command.read_text().strip() == "ssh":
                        os.kill(pid, signal.SIGKILL)
                        kills += 1
                except (ProcessLookupError, FileNotFoundError):
                    pass

    def patiently(request: Callable[[], object]) -> object:
        for _ in range(200):
            try:
                return request()
            except RemoteUnreachable:
                time.sleep(0.05)
        raise AssertionError("the server was never there")

    winners: dict[str, list[bytes]] = {}

    def work(number: int) -> None:
        client = clients[number % 2]
        for turn in count():
            if turn >= 6 and kills >= _KILLS:
                return
            content = os.urandom(700_000)
            name = f"packs/{hashlib.sha256(content).hexdigest()}"
            patiently(lambda content=content, name=name: client.put(name, [content]))  # type: ignore[misc]
            assert patiently(lambda name=name: client.get(name)) == content  # type: ignore[misc]
            mine = b"%d" % number
            patiently(lambda turn=turn, mine=mine: client.create(f"race/{turn}", mine))  # type: ignore[misc]
            # As every caller does: who was told False reads what is there.
            seen = patiently(lambda turn=turn: client.get(f"race/{turn}"))  # type: ignore[misc]
            assert isinstance(seen, bytes)
            winners.setdefault(f"race/{turn}", []).append(seen)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
    finally:
        done.set()
        killer.join()
        for client in clients:
            client.close()
    assert all(len(set(seen)) == 1 for seen in winners.values())
    there = DirectoryObjects(directory)
    assert len(list(there.list("packs/"))) >= 24
    for info in there.list("packs/"):
        assert hashlib.sha256(there.get(info.name)).hexdigest() == info.name.removeprefix("packs/")


def test_a_key_that_may_only_add(ssh_server: SshServer) -> None:
    """With the forced command of the manual a key adds objects to one directory, and deletes and replaces none."""
    directory = Path(parse_url(ssh_server.new_url()).prefix)
    forced = f"{ssh_server.program} remote serve --stdio --append-only {directory}"
    try:
        ssh_server.admit(f'restrict,command="{forced}"')
        # The directory that the client names does not count.
        client = ssh_server.connect(ssh_server.url_of(directory.parent / "elsewhere"))
        client.put("packs/a", [b"kept"])
        client.put("packs/a", [b"kept"])
        assert client.create("w/1", b"mine")
        assert not client.create("w/1", b"other")
        with pytest.raises(RemoteRefused, match="may only add"):
            client.put("packs/a", [b"spoilt"])
        with pytest.raises(RemoteRefused, match="may only add"):
            client.delete(["packs/a"])
        # A decision of a collector deletes.
        for name in ("gc/0000000000.final", f"repositories/{'ab' * 16}/gc/0000000000"):
            with pytest.raises(RemoteRefused, match="may not collect"):
                client.create(name, b"{}")
            with pytest.raises(RemoteRefused, match="may not collect"):
                client.put(name, [b"{}"])
        assert client.create("manifests/gc/0-0/host", b"a job of that name")
        assert client.get("packs/a") == b"kept"
        # A host still says how it is: each hour under a new name.
        sealer, told = Sealer(recipe.REMOTE_ID, None), [recipe.STATUS]
        reporter = StatusReporter(client, sealer, recipe.STATUS_KEY, lambda: told[-1], 300)
        assert reporter.report()
        told.append(msgspec.structs.replace(recipe.STATUS, time_ns=recipe.TIME_NS + 1, error="later"))
        assert reporter.report()
        ((_, _, status, flaw),), _ = read_statuses(client, sealer)
        assert (status and status.error, flaw) == ("later", "")
        client.close()
        assert not (directory.parent / "elsewhere").exists()
        assert (directory / "packs" / "a").read_bytes() == b"kept"
    finally:
        ssh_server.admit()


def test_refusals_say_what_to_do(ssh_server: SshServer, tmp_path: Path) -> None:
    """No ciuic there, a key that is not admitted, another host key, no sshd and no ssh: each is told as what it is."""
    url = ssh_server.new_url()
    where = parse_url(url)

    def refused(kind: type[CiuicError], match: str, **changed: str) -> CiuicError:
        given = {"ssh_command": ssh_server.command, "ssh_program": ssh_server.program, **changed}
        client = SshObjects(where, StoreSettings(**given), make=True)
        with pytest.raises(kind, match=match) as error:
            client.put("a", [b"1"])
        client.close()
        return error.value

    missing = refused(RemoteRefused, "does not run on the server", ssh_program="/nowhere/ciuic")
    assert "ssh_program" in missing.hint
    other = tmp_path / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True, timeout=60)
    refused(
        RemoteRefused,
        "Permission denied",
        ssh_command=ssh_server.command.replace(f"{ssh_server.place}/user_key", f"{other}"),
    )
    known = tmp_path / "known_hosts"
    known.write_text(f"ciuic-test {Path(f'{other}.pub').read_text()}")
    changed = ssh_server.command.replace(f"{ssh_server.place}/known_hosts", str(known))
    refused(RemoteRefused, "verification failed", ssh_command=changed)
    without_ssh = refused(RemoteRefused, "cannot run /nowhere/ssh", ssh_command="/nowhere/ssh")
    assert "OpenSSH" in without_ssh.hint
    (port,) = free_ports(1)
    nobody = SshObjects(parse_url(f"ssh://127.0.0.1:{port}/d"), StoreSettings(ssh_command=ssh_server.command))
    with pytest.raises(RemoteUnreachable, match="refused"):
        nobody.get("a")
    with pytest.raises(UsageError, match="cannot be parsed"):
        SshObjects(where, StoreSettings(ssh_command="ssh 'unbalanced"))
    without = ssh_server.connect(url, make=False)
    with pytest.raises(RemoteUnreachable, match="no such directory"):
        without.get("a")
    without.close()


def test_many_threads_share_a_connection(ssh_server: SshServer) -> None:
    """Large and small requests of many threads interleave on one connection, which is replaced meanwhile."""
    client = ssh_server.connect(ssh_server.new_url())

    def work(number: int) -> None:
        content = os.urandom(1 << (10 + number % 13)) * (1 + number % 2)
        name = f"o/{number}"
        client.put(name, [content[:100], content[100:]])
        assert client.create(f"{name}.mark", b"")
        if number % 10 == 0:
            client.reconnect()
        assert client.get(name) == content
        assert client.tail(name, 50) == (len(content), content[-50:])
        assert [bytes(part) for part in client.get_ranges(name, [(5, 40), (0, len(content) + 9)])] == [
            content[5:45],
            content,
        ]

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(work, range(60)))
    assert len(list(client.list("o/"))) == 120
    client.close()
    with pytest.raises(TooLargeObject):
        client.put("large", [bytes(1 << 20)] * 129)


def test_a_slow_and_long_line(ssh_server: SshServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 2 Mbit/s and 200 ms a commit does not wait for the end of a body that is on its way, and nobody is taken for gone."""
    monkeypatch.setattr(ssh_objects, "_SILENT_SECONDS", 10.0)
    line = shlex.join(
        (sys.executable, str(Path(slow_line.__file__)), "127.0.0.1", str(ssh_server.port), "250000", "0.1")
    )
    url = ssh_server.new_url()
    client = SshObjects(
        parse_url(url),
        StoreSettings(
            ssh_command=f"{ssh_server.command} -o ProxyCommand={shlex.quote(line)}",
            ssh_program=ssh_server.program,
        ),
        make=True,
    )
    assert client.create("w/0", b"hello")
    content = os.urandom(3 << 20)
    with ThreadPoolExecutor(1) as threads:
        body = threads.submit(client.put, "packs/a", [content])
        answered = 0
        while not body.done():
            assert client.create(f"w/{answered + 1}", b"commit")
            answered += 1
        body.result()
    assert answered
    assert client.get_ranges("packs/a", [(1 << 20, 1000)]) == [content[1 << 20 :][:1000]]
    client.close()
    assert DirectoryObjects(parse_url(url).prefix).get("packs/a") == content


class Scripted:
    """A program in place of ssh: it says hello, and answers each request with what a test says."""

    def __init__(self, place: Path, body: str) -> None:
        script = place / "ssh.py"
        script.write_text(
            textwrap.dedent(
                """
                import os, sys
                from ciuic.remote.objects.pipe_protocol import *
                def read(length):
                    parts = b""
                    while len(parts) < length and (part := os.read(0, length - len(parts))):
                        parts += part
                    return parts
                def say(number, reply, body=b"", kind=MESSAGE):
                    payload = msgspec.msgpack.encode(reply)
                    os.write(1, HEAD.pack(number, kind, len(payload)) + payload)
                    if body:
                        os.write(1, HEAD.pack(number, BODY, len(body)) + body)
                os.write(1, MAGIC)
                def requests():
                    while (frame := read_frame(read)) is not None:
                        if frame.kind == MESSAGE:
                            request = decode_request(frame.payload)
                            if request.operation == "open":
                                say(frame.number, Reply())
                            else:
                                yield frame.number, request
                """
            )
            + textwrap.dedent(body)
        )
        self.command = shlex.join((sys.executable, str(script)))

    def connect(self) -> SshObjects:
        """Return a client of this server."""
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
        return SshObjects(
            parse_url("ssh://h/d"), StoreSettings(ssh_command=self.command), environment=environment
        )


@pytest.mark.parametrize(
    "answer",
    [
        "say(number, Reply(body_bytes=1 << 40))",
        "say(number, Reply(body_bytes=-1))",
        "say(number, Reply(body_bytes=4, size_bytes=4, lengths=[4], created=True), b'12345678')",
        "say(number + 1, Reply())",
        "os.write(1, HEAD.pack(number, BODY, 4) + b'1234')",
        "os.write(1, HEAD.pack(number, 77, 0))",
        "os.write(1, HEAD.pack(number, MESSAGE, 1 << 30))",
        "os.write(1, HEAD.pack(number, MESSAGE, 5) + b'ohnoo')",
        "os.write(1, b'junk' * 100)",
        "say(number, Reply(infos=[('w/b', 1, 1), ('w/a', 1, 1)] * 500, lengths=[9], size_bytes=-3))",
        "say(number, Reply(infos=[('../../etc/passwd', 1, 1)], lengths=[-4, 4], size_bytes=5))",
        "say(number, Reply(error='Nonsense', message='x\\n' * 1000))",
        "sys.exit(0)",
    ],
)
def test_a_server_that_lies_is_caught(tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a server answers, reads end with an error that is told, or with bytes that fit what was asked for."""
    monkeypatch.setattr(ssh_objects, "_FIRST_PAUSE_SECONDS", 0.0)
    scripted = Scripted(tmp_path, f"for number, request in requests():\n    {answer}\n")
    for read in (
        lambda client: client.get("a"),
        lambda client: client.tail("a", 4),
        lambda client: client.get_ranges("a", [(0, 4)]),
        lambda client: list(client.list("w/")),
    ):
        client = scripted.connect()
        try:
            found = read(client)
        except (RemoteUnreachable, RemoteRefused):
            continue
        finally:
            client.close()
        # An answer without a body is one to a reader of everything.
        assert found in (b"", [])


def test_a_server_that_says_nothing_counts_as_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is silent while a request waits is given up; one that sends signs of life is waited for."""
    monkeypatch.setattr(ssh_objects, "_SILENT_SECONDS", 3.0)
    monkeypatch.setattr(ssh_objects, "_TRIES", 1)
    slow = Scripted(
        tmp_path,
        """
        import time
        for number, request in requests():
            for _ in range(6):
                time.sleep(1)
                if request.name == "slow":
                    os.write(1, HEAD.pack(0, ALIVE, 0))
            say(number, Reply(body_bytes=2), b"ok")
        """,
    )
    client = slow.connect()
    assert client.get("slow") == b"ok"
    with pytest.raises(RemoteUnreachable, match="silent"):
        client.get("dead")
    client.close()


def test_a_shell_that_prints_something_first(tmp_path: Path) -> None:
    """What a login shell prints before the server's hello is skipped, unless it does not end."""
    answers = "for number, request in requests():\n    say(number, Reply(body_bytes=2), b'ok')\n"
    scripted = Scripted(tmp_path, answers)
    script = tmp_path / "ssh.py"
    text = script.read_text()
    script.write_text(
        text.replace("os.write(1, MAGIC)", "os.write(1, b'Welcome!\\n\\0ciuic-ob' + b'-' * 9000 + MAGIC)")
    )
    client = scripted.connect()
    assert client.get("a") == b"ok"
    client.close()
    script.write_text(text.replace("os.write(1, MAGIC)", "[os.write(1, b'spam' * 100) for _ in range(1000)]"))
    client = scripted.connect()
    with pytest.raises(RemoteRefused, match="prints too much"):
        client.get("a")
    client.close()


class Piped:
    """A server in a thread, and the client's ends of its pipes."""

    def __init__(self, directory: Path, *, idle_seconds: float = 30.0, max_bytes: int | None = None) -> None:
        self.read_fd, write_fd = os.pipe()
        read_fd, self.write_fd = os.pipe()
        self.error: BaseException | None = None

        def run() -> None:
            try:
                serve(str(directory), read_fd, write_fd, idle_seconds=idle_seconds, max_bytes=max_bytes)
            except CiuicError as error:
                self.error = error
            finally:
                os.close(read_fd)
                os.close(write_fd)

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert os.read(self.read_fd, len(MAGIC)) == MAGIC

    def send(self, number: int, request: Request) -> None:
        """Send a request without its body."""
        payload = msgspec.msgpack.encode(request)
        os.write(self.write_fd, HEAD.pack(number, MESSAGE, len(payload)) + payload)

    def reply(self) -> Reply:
        """Return the next reply."""
        frame = read_frame(lambda length: os.read(self.read_fd, length))
        assert frame is not None
        return decode_reply(frame.payload)

    def end(self) -> None:
        """Hang up, and wait for the end of the server."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1
        self.thread.join(60)
        assert not self.thread.is_alive()
        os.close(self.read_fd)


def test_a_body_that_is_cut_leaves_nothing(tmp_path: Path) -> None:
    """A client that hangs up within a body has stored nothing; one whose body was whole has."""
    piped = Piped(tmp_path / "d")
    piped.send(1, Request("open", length=VERSION, make=True))
    assert piped.reply().error == ""
    piped.send(2, Request("put", "whole", body_bytes=4))
    os.write(piped.write_fd, HEAD.pack(2, BODY, 4) + b"1234")
    piped.send(3, Request("put", "cut", body_bytes=8))
    os.write(piped.write_fd, HEAD.pack(3, BODY, 4) + b"1234")
    piped.end()
    assert piped.error is None
    objects = DirectoryObjects(str(tmp_path / "d"))
    assert [info.name for info in objects.list("")] == ["whole"]
    with pytest.raises(NoSuchObject):
        objects.get("cut")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "create", "other", "delete"]), st.integers(0, 5), st.integers(0, 20_000)
        ),
        max_size=20,
    )
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_directory_with_a_limit_never_grows_beyond_it(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[tuple[Literal["put", "create", "other", "delete"], int, int]],
) -> None:
    """An object that fits is stored, and any other refused without a trace, with two connections and another writer."""
    monkeypatch.setattr(pipe_server, "_FULL_SECONDS", 0.0)
    directory, limit = tmp_path_factory.mktemp("limited") / "d", 50_000
    connections = [Piped(directory, max_bytes=limit) for _ in range(2)]
    try:
        for piped in connections:
            piped.send(1, Request("open", length=VERSION, make=True))
            assert piped.reply().error == ""
        others = DirectoryObjects(str(directory))

        def there() -> dict[str, int]:
            return {info.name: info.size_bytes for info in others.list("")}

        for number, (kind, name, size_bytes) in enumerate(steps, 2):
            before = there()
            fits = _blocks(size_bytes) + 4096 <= limit - _taken(before)
            if kind == "delete":
                others.delete([f"packs/o{name}"])
            elif kind == "other":
                if fits:
                    others.put(f"packs/x{name}", [bytes(size_bytes)])
                    others.delete([f"packs/x{name}"])
            else:
                piped = connections[number % 2]
                piped.send(number, Request(kind, f"packs/o{name}", body_bytes=size_bytes))
                if size_bytes:
                    os.write(piped.write_fd, HEAD.pack(number, BODY, size_bytes) + bytes(size_bytes))
                assert piped.reply().error == ("" if fits else "RemoteFull")
                if not fits:
                    assert there() == before
            assert _taken(there()) <= limit
    finally:
        for piped in connections:
            piped.end()


def _taken(objects: dict[str, int]) -> int:
    """Return what objects of one directory take, with that."""
    return sum(map(_blocks, objects.values())) + (4096 if objects else 0)


def _blocks(size_bytes: int) -> int:
    return max(1, -(-size_bytes // 4096)) * 4096


def test_a_full_directory_is_not_counted_for_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes on asking has the directory walked once, reads what is there, and can still write what a removal needs."""
    piped = Piped(tmp_path / "d", max_bytes=16_384)
    counted: list[str] = []
    walked = DirectoryObjects.list

    def count(self: DirectoryObjects, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        counted.append(prefix)
        return walked(self, prefix, after=after)

    monkeypatch.setattr(DirectoryObjects, "list", count)
    piped.send(1, Request("open", length=VERSION, make=True))
    assert piped.reply().error == ""
    for number, expected in [(2, ""), (3, ""), *((number, "RemoteFull") for number in range(4, 20))]:
        piped.send(number, Request("create", f"packs/o{number}", body_bytes=0))
        reply = piped.reply()
        assert (reply.error, "16KiB" in reply.message) == (expected, bool(expected))
    assert len(counted) == 1
    piped.send(30, Request("info", "packs/o3"))
    assert piped.reply().found
    piped.send(31, Request("create", "gc/1.begun", body_bytes=0))
    assert piped.reply().error == ""
    piped.end()


def test_versions_that_differ_are_told(tmp_path: Path) -> None:
    """A client of another version is told so by the server; a request before the first one is refused."""
    piped = Piped(tmp_path / "d")
    piped.send(1, Request("get", "a"))
    assert "open" in piped.reply().message
    piped.send(2, Request("open", length=VERSION + 1, make=True))
    reply = piped.reply()
    assert (reply.error, "speaks version" in reply.message) == ("RemoteRefused", True)
    assert not (tmp_path / "d").exists()
    piped.end()


def test_a_server_without_requests_ends(tmp_path: Path) -> None:
    """A server whose client is gone without a word ends by itself."""
    piped = Piped(tmp_path, idle_seconds=1.0)
    piped.thread.join(60)
    assert not piped.thread.is_alive()
    piped.end()


@given(
    st.binary(max_size=200)
    | st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 2, 3]), st.binary(max_size=40)))
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_client_brings_the_server_down(tmp_path: Path, sent: bytes | list[tuple[int, int, bytes]]) -> None:
    """Whatever bytes come, the server ends by itself, with an error that is told, and makes nothing."""
    piped = Piped(tmp_path / "d", idle_seconds=5.0)
    data = (
        sent if isinstance(sent, bytes) else b"".join(HEAD.pack(n, kind, len(p)) + p for n, kind, p in sent)
    )
    with contextlib.suppress(BrokenPipeError):
        os.write(piped.write_fd, data)
    piped.end()
    assert piped.error is None or isinstance(piped.error, Damaged)
    assert not (tmp_path / "d").exists()


def test_a_reply_that_is_none_is_nonsense() -> None:
    """Bytes that are no reply raise the error that has a read repeated."""
    with pytest.raises(NonsenseReply):
        decode_reply(b"\xc1")


def test_a_command_that_cannot_connect_names_what_to_try() -> None:
    """Advice for a remote over SSH is about SSH, not about servers of object stores."""
    result = CliRunner().invoke(
        cli, ["--repo", "ssh://u@h/srv/x", "list"], env={"CIUIC_SSH_COMMAND": "false", "CIUIC_REPO": ""}
    )
    assert result.exit_code != 0
    assert "ssh" in result.stderr
    assert "CIUIC_SSH_COMMAND" in result.stderr
    assert "AWS_ENDPOINT_URL" not in result.stderr
