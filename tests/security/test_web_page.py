"""Attackers of the page of `ciuic web`: other sites' pages, other users, callers without a session, and what is in snapshots.

See docs/security.md.
"""

from __future__ import annotations

import functools
import grp
import http.client
import io
import json
import os
import random
import socket
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from support.live import module_tmp
from support.second_user import User, run_as
from support.site import Site, running_site
from support.web_page import WebPage, place, web_page

__all__ = ["module_tmp"]
pytestmark = pytest.mark.mount
MALLORY = User(61011, 61011)
PROXY = "daemon"
GROUPS = {"look": "users", "restore": "sys", "decide": "bin"}
CONTROL_GROUP = "games"
_PAGES = (
    "/", "/snapshots", "/snapshot", "/files", "/versions", "/image", "/download", "/restore", "/action",
    "/action/events", "/alerts", "/log",
)  # fmt: skip
_ASK = """
import http.client, socket, sys
class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(sys.argv[1])
connection = Connection("localhost")
connection.putrequest(sys.argv[2], sys.argv[3], skip_host=True)
for header in ("Host: localhost", "Content-Length: 0", *sys.argv[4:]):
    connection.putheader(*header.split(": ", 1))
connection.endheaders()
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""


@pytest.fixture
def short_tmp(short_tmp: Path, run_dir: Path) -> Path:
    """Return a directory that every user can enter, as /run."""
    run_dir.chmod(0o755)
    short_tmp.chmod(0o755)
    return short_tmp


@pytest.fixture(scope="module")
def site(module_tmp: Path) -> Iterator[Site]:
    with running_site(module_tmp, "data") as made:
        (root,) = made.roots
        (root / "file").write_text("text\n")
        made.snapshot()
        yield made


@pytest.fixture(scope="module")
def server(site: Site) -> Iterator[WebPage]:
    site.config.write_text(
        f'{site.config.read_text()}[control]\ngroup = "{CONTROL_GROUP}"\n'
        f'[web]\nproxy_user = "{PROXY}"\nuser_header = "X-User"\n'
        + "".join(f'{right}_group = "{name}"\n' for right, name in GROUPS.items())
    )
    with web_page(site, "--actions") as made:
        yield made


@pytest.fixture
def page(server: WebPage) -> WebPage:
    """Return the page with a new session."""
    server.log_in()
    return server


def ask_as(user: User, page: WebPage, method: str, target: str, *headers: str) -> str:
    """Ask over the Unix socket, as another user; return status and body."""
    ran = run_as(
        user,
        _ASK,
        os.fspath(page.socket),
        method,
        target,
        *headers,
        imports="import encodings.idna, http.client",
    )
    return ran.stdout


def raw(page: WebPage, text: bytes) -> bytes:
    """Send bytes over TCP, and return the answer."""
    with socket.create_connection(("127.0.0.1", page.port), 60) as connection:
        try:
            connection.sendall(text.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            return b"".join(iter(lambda: connection.recv(65536), b""))
        except ConnectionError:
            return b""


def snapshots(page: WebPage) -> str:
    return page.run("list", "--machine-readable").stdout


# -- other sites


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site", "Origin": ""},
        {"Sec-Fetch-Site": "same-site", "Origin": ""},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
    ],
)
def test_other_sites_are_refused(page: WebPage, headers: dict[str, str]) -> None:
    """A form of another site's page changes nothing, even with the cookie and the token; a rebound name gets no content."""
    csrf = page.ask("/").csrf
    before = snapshots(page)
    answer = page.ask("/act", {"csrf": csrf, "kind": "snapshot"}, headers)
    assert answer.status in (403, 421)
    assert "csrf" not in answer.text
    assert snapshots(page) == before
    if "Host" in headers:
        assert page.ask("/", headers=headers).status == 421
    # A link on another site leads here, and embeds nothing.
    navigation = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert page.ask("/", headers=navigation).status == 200
    embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert page.ask("/static/page.css", headers=embedded).status == 403


def test_headers_that_come_twice_do_not_win(page: WebPage) -> None:
    """A header that comes twice counts as both, in whichever order."""
    for first, second in (("same-origin", "cross-site"), ("cross-site", "same-origin")):
        answer = raw(
            page,
            f"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: {page.cookie}\r\nSec-Fetch-Site: {first}\r\nSec-Fetch-Site: {second}\r\n\r\n".encode(),
        )
        assert answer.startswith(b"HTTP/1.1 403")
    twice = "GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert raw(page, twice.encode()).startswith(b"HTTP/1.1 400")
    split = (
        f"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: a=1\r\nCookie: {page.cookie}\r\nCookie: b=2\r\n\r\n"
    )
    assert raw(page, split.encode()).startswith(b"HTTP/1.1 200")


def test_huge_requests_end_their_connection(page: WebPage) -> None:
    """Heads and bodies without end are refused."""
    assert raw(page, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))[:12] in (
        b"HTTP/1.1 400",
        b"",
    )
    assert page.ask("/act", {"csrf": "x" * (1 << 17)}).status == 400
    assert page.ask("/act?" + "&".join(f"a{n}=1" for n in range(1000)), {"csrf": ""}).status == 400
    assert page.ask("/").status == 200


# -- without a session, or with another's


def test_without_a_session_nothing_is_shown(page: WebPage) -> None:
    """No page, no event and no form answers without a cookie, or with one that is none; links are not made over TCP."""
    mine, page.cookie = page.cookie, ""
    for cookie in ("", "ciuic_session=", "ciuic_session=guess", mine[:-1]):
        for target in (*_PAGES, "/events", "/no-such-page"):
            answer = page.ask(target, headers={"Cookie": cookie})
            assert answer.status == 401, target
            assert "file" not in answer.text
        assert page.ask("/act", {"csrf": "", "kind": "snapshot"}, {"Cookie": cookie}).status == 401
    assert page.ask("/login-link", method="POST").status == 403


def test_a_stolen_cookie_ends_with_its_session(page: WebPage) -> None:
    """Who logs out takes the cookie from whoever has copied it."""
    csrf = page.ask("/").csrf
    assert page.ask("/logout", {"csrf": csrf}).status == 303
    assert page.ask("/").status == 401


def test_a_token_is_its_session_s(page: WebPage) -> None:
    """A form with the token of another session, with none, or sent by GET, changes nothing."""
    others = page.ask("/").csrf
    page.log_in()
    mine = page.ask("/").csrf
    assert mine != others
    before = snapshots(page)
    for token in (others, "", mine[:-1], mine + "0"):
        assert page.ask("/act", {"csrf": token, "kind": "snapshot"}).status == 403
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert page.ask(f"/act?csrf={mine}&kind=snapshot", method=method).status == 404
    assert snapshots(page) == before


def test_a_link_survives_a_look_and_no_guess(page: WebPage) -> None:
    """A prefetch does not use a link up; guesses do not open it, and its second use does not either."""
    link = page.link()
    for method in ("GET", "HEAD", "GET"):
        assert page.ask(link, method=method).status == 200
    token = link.rpartition("=")[2]
    for guess in ("", token[:-1], token + "A", token.swapcase(), "\0", "\udcff"):
        encoded = quote(guess, errors="surrogateescape")
        assert page.ask(f"/login?token={encoded}", {}).status == 403
    assert page.ask("/login", {"token": token}).status == 303
    assert page.ask("/login", {"token": token}).status == 403


# -- other users of the host


def test_another_user_gets_nothing_over_the_socket(page: WebPage) -> None:
    """The kernel says who calls: another user sees the login page, gets no link, and no proxy's header makes them somebody."""
    assert ask_as(MALLORY, page, "GET", "/").startswith("401")
    assert ask_as(MALLORY, page, "GET", "/", "X-User: root").startswith("401")
    assert ask_as(MALLORY, page, "POST", "/login-link").startswith("403")
    assert page.ask("/", headers={"X-User": "root", "Cookie": ""}).status == 401
    assert page.ask("/", headers={"Cookie": ""}, over_unix=True).status == 200


def test_a_proxy_says_who_calls_and_no_more(page: WebPage) -> None:
    """The proxy's user gets in by the header alone, and gets no link; a header that was there before is in the name, not instead."""
    import pwd

    found = pwd.getpwnam(PROXY)
    assert ask_as(User(found.pw_uid, found.pw_gid), page, "GET", "/", "X-User: root").startswith("401")
    proxy = member("look")._replace(uid=found.pw_uid, gid=found.pw_gid)
    assert ask_as(proxy, page, "GET", "/").startswith("401")
    assert ask_as(proxy, page, "POST", "/login-link", "X-User: root").startswith("403")
    shown = ask_as(proxy, page, "GET", "/", "X-User: anna")
    assert shown.startswith("200")
    assert "anna" in shown
    assert ask_as(proxy, page, "GET", "/restore", "X-User: root").startswith("403")
    assert "root, mallory" in ask_as(proxy, page, "GET", "/", "X-User: root", "X-User: mallory")


def member(right: str) -> User:
    """Return a user who has a right by their group."""
    return User(61012, 61012, (grp.getgrnam(GROUPS[right]).gr_gid,))


def test_the_control_group_is_not_let_in(page: WebPage) -> None:
    """Who may use the daemon's control socket sees the login page and gets no link, like everybody else."""
    administrator = User(61013, 61013, (grp.getgrnam(CONTROL_GROUP).gr_gid,))
    assert ask_as(administrator, page, "GET", "/").startswith("401")
    assert ask_as(administrator, page, "POST", "/login-link").startswith("403")


@pytest.mark.parametrize(
    ("right", "lacks"),
    [
        ("look", {"/restore": "sys or bin", "/act?kind=undo": "sys or bin", "/act?kind=hold": "bin"}),
        ("restore", {"/act?kind=hold": "bin", "/act?kind=forget": "bin", "/act?kind=snapshot": "bin"}),
        ("decide", {}),
    ],
)
def test_a_group_has_its_right_and_no_more(
    page: WebPage, site: Site, right: str, lacks: dict[str, str]
) -> None:
    """By the kernel's word, and through a link that a member asked for: what is above is absent, or refused with the group's name."""
    for target, names in lacks.items():
        refused = ask_as(member(right), page, "POST" if "act" in target else "GET", target)
        assert refused.startswith("403")
        assert f"members of {names} may" in refused
    made = ask_as(member(right), page, "POST", "/login-link")
    token = json.loads(made.removeprefix("200 "))["path"].partition("=")[2]
    page.cookie = page.ask("/login", {"token": token}).headers["set-cookie"].partition(";")[0]
    before = snapshots(page)
    file = place(site.roots[0] / "file")
    assert page.ask(f"/download?{file}").body == b"text\n"
    shown = page.ask(f"/files?{file}")
    assert ("Restore…" in shown.text) == (right != "look")
    assert page.ask(f"/restore?{file}").status == (403 if right == "look" else 200)
    assert ("Take a snapshot now" in page.ask("/").text) == (right == "decide")
    for target, names in lacks.items():
        answer = page.ask(target, {"csrf": shown.csrf} if "act" in target else None)
        assert answer.status == 403
        assert f"members of {names} may" in answer.text
    assert snapshots(page) == before


def test_no_file_is_written_without_its_name(page: WebPage, site: Site, short_tmp: Path) -> None:
    """A restore asks for the name of what it writes, also in a directory of root's that has no such file."""
    root, id_ = site.roots[0], site.snapshot()
    (short_tmp / "cron.d").mkdir()
    for typed in ("", "data", "file"):
        answer = page.act(
            "restore", place(root / "file", id_), dest=os.fspath(short_tmp / "cron.d"), typed=typed
        )
        assert answer.status == 400
        assert "to confirm, type cron.d" in answer.text
    assert list((short_tmp / "cron.d").iterdir()) == []
    (root / "file").write_text("newer\n")
    assert page.act("restore", place(root / "file", id_), typed="data").status == 400
    csrf = page.ask("/").csrf
    assert page.ask(f"/act?s={id_}", {"csrf": csrf, "kind": "undo", "typed": ""}).status == 400
    assert (root / "file").read_text() == "newer\n"
    page.act("restore", place(root / "file", id_), typed="file")
    assert (root / "file").read_text() == "text\n"


def test_a_process_of_the_front_s_user_cannot_give_orders(page: WebPage) -> None:
    """The broker's socket is the front's alone: nobody else who runs as nobody reaches it."""
    found = run_as(
        User(65534, 65534),
        "import socket, sys\ntry:\n    socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n    print('connected')\nexcept OSError as e:\n    print(e.strerror)",
        os.fspath(page.socket.parent / "private/broker.sock"),
    )
    assert found.stdout.strip() == "Permission denied"
    assert page.ask("/log").status == 200


def test_a_front_that_lies_has_no_rights_of_its_own(page: WebPage) -> None:
    """An order that comes straight to the broker is refused without a grant, whoever it says it is from."""
    before = snapshots(page)
    for grant in ("", "guess"):
        order = json.dumps({"kind": "snapshot", "who": "root", "grant": grant})
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.fspath(page.socket.parent / "private/broker.sock"))
            connection.sendall(
                f"POST /actions HTTP/1.1\r\nHost: ciuic\r\nContent-Length: {len(order)}\r\n\r\n{order}".encode()
            )
            assert connection.recv(65536).startswith(b"HTTP/1.1 403")
    assert snapshots(page) == before


def test_the_front_is_confined(page: WebPage) -> None:
    """It is filtered, has no network of its own, is the first to go when memory is short, and its memory is bounded."""
    proc = Path(f"/proc/{page.front()}")
    status = dict(
        line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line
    )
    assert status["Seccomp"] == "2"
    assert os.readlink(proc / "ns/net") != os.readlink("/proc/self/ns/net")
    assert (proc / "oom_score_adj").read_text().strip() == "500"
    assert "Max data size             1073741824" in (proc / "limits").read_text()


# -- paths and ids


def test_no_text_of_a_request_breaks_a_page(page: WebPage, site: Site) -> None:
    """Whatever is asked for, the answer is a page or a refusal, and never an internal error; paths lead nowhere but into snapshots."""
    root = os.fspath(site.roots[0])
    texts = [
        "..", "/..", f"{root}/../../etc/passwd", f"{root}/%2e%2e/%2e%2e/etc/passwd", "%00", f"{root}/file%00", "%ff%fe", f"{root}/%ff",
        f"{root}/" + "n" * 255, f"{root}/" + "n" * 256, "/" + "n/" * 2048, "%ED%A0%80", "--help", "-1", "@{-1}", "latest~999999999999",
        "9" * 400, "%0a", "cs-" + "0" * 64, "/proc/self/environ", "%F0%9F%92%A9", "%u0000", "", "[", "**", "%5c", "1e9", "today", "\u00e9",
    ]  # fmt: skip
    for target in _PAGES:
        for name in ("p", "s", "start", "after", "from", "tag", "root", "q", "n", "pq"):
            # Others for each: in the whole each text is asked for many times.
            for text in random.Random(target + name).sample(texts, 8):
                encoded = quote(text, safe="%/~@{}[]*")
                others = (
                    f"&{place(root)}" if name not in ("p", "s", "pq") else f"&p={root}" if name == "s" else ""
                )
                if target in ("/action/events",) and name != "n":
                    continue
                answer = page.ask(f"{target}?{name}={encoded}{others}")
                assert answer.status in (200, 400, 404), (target, name, text, answer.text)
                assert b"root:x:" not in answer.body
    for path in (
        "/../../etc/passwd",
        "/static/../templates/base.html",
        "/static/%2e%2e/front.py",
        "/static/",
        "/%00",
        "//",
        "/static/%ff",
    ):
        assert page.ask(path).status == 404, path


def test_ids_and_kinds_are_no_options(page: WebPage, site: Site) -> None:
    """What a form says is a value in the command, never an option or another command."""
    csrf = page.ask("/").csrf
    before = snapshots(page)
    for kind in ("forget", "undo", "hold", "release", "restore", "plan", "service", "--help", "prune"):
        for id_ in ("--all", "-y", "latest", "cs-", "cs-1 --yes", "../x"):
            answer = page.ask(
                f"/act?s={quote(id_)}&p={quote(os.fspath(site.roots[0]))}",
                {"csrf": csrf, "kind": kind, "typed": id_},
            )
            assert answer.status in (303, 400, 404), (kind, id_)
            if answer.status == 303:
                pytest.fail(f"{kind} {id_} was begun")
    for message in ("a\nb", "x" * 1001, "\0", "\u202e"):
        assert page.ask("/act", {"csrf": csrf, "kind": "snapshot", "message": message}).status == 400
    assert snapshots(page) == before


def test_a_restore_does_not_follow_links_of_another_user(page: WebPage, site: Site, short_tmp: Path) -> None:
    """What is restored into a directory of another user stays there, also where they have put a link in its place."""
    secret = short_tmp / "secret"
    secret.mkdir()
    (secret / "file").write_text("mine\n")
    home = short_tmp / "home"
    home.mkdir()
    os.symlink(secret, home / "data")
    os.chown(home, MALLORY.uid, MALLORY.gid)
    os.lchown(home / "data", MALLORY.uid, MALLORY.gid)
    id_ = site.snapshot()
    page.act("restore", place(site.roots[0], id_), dest=os.fspath(home), typed="home")
    assert (secret / "file").read_text() == "mine\n"
    assert [path.name for path in secret.iterdir()] == ["file"]


# -- callers that take their time


def test_connections_that_stall_keep_root_out_of_nothing(page: WebPage) -> None:
    """With every place over TCP and every place for others over the Unix socket taken, root is answered over the socket; all of them end."""
    with ExitStack() as held:
        for _ in range(600):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", page.port), 60))
            connection.sendall(b"GET / HT")
        stalling = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
held = []
for _ in range(500):
    one = socket.socket(socket.AF_UNIX)
    one.connect(sys.argv[1])
    one.send(b"GET / HT")
    held.append(one)
held[0].settimeout(60)
assert held[0].recv(100) == b""  # ended by the page
"""
        ran = run_as(MALLORY, stalling, os.fspath(page.socket), imports="import resource")
        assert ran.returncode == 0, ran.stderr
        assert page.ask("/", over_unix=True, headers={"Cookie": ""}).status == 200
    assert page.ask("/").status == 200


@pytest.mark.full
def test_strangers_keep_nobody_out(page: WebPage, site: Site) -> None:
    """Strangers who take every place, and read nothing of what they ask for, keep no session out and end no stream of one."""
    stream = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    stream.request("GET", "/events", headers={"Cookie": page.cookie})
    events = stream.getresponse()
    asked = b"GET /static/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500
    with ExitStack() as held:
        for number in range(600):
            one = held.enter_context(socket.create_connection(("127.0.0.1", page.port), 60))
            one.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                one.send(asked)
            if number % 100 == 99:
                assert page.ask("/snapshots").status == 200
        assert page.ask("/").status == 200
        id_ = site.snapshot()
        while id_.encode() not in events.readline():
            pass
    stream.close()


def test_strangers_are_answered_once(page: WebPage) -> None:
    """An unauthenticated connection gets one answer and is closed; a session's pipelined requests are all answered."""
    for cookie, answers in (("", 1), (f"Cookie: {page.cookie}\r\n", 3)):
        asked = f"GET / HTTP/1.1\r\nHost: localhost\r\n{cookie}"
        with socket.create_connection(("127.0.0.1", page.port), 60) as one, one.makefile("rb") as answered:
            one.sendall(f"{asked}\r\n{asked}\r\n{asked}Connection: close\r\n\r\n".encode())
            read = b""
            with suppress(ConnectionError):
                while line := answered.readline():
                    read += line
            assert read.count(b"HTTP/1.1 200") + read.count(b"HTTP/1.1 401") == answers


def test_each_peer_has_a_place(page: WebPage) -> None:
    """An address that fills all connection slots loses its own connections, never those of another address."""
    with ExitStack() as held:
        other = held.enter_context(
            socket.create_connection(("127.0.0.1", page.port), 60, source_address=("127.0.0.2", 0))
        )
        other.sendall(b"GET / HTTP/1.1\r\n")
        # More than there are places.
        for _ in range(470):
            one = held.enter_context(socket.create_connection(("127.0.0.1", page.port), 60))
            one.sendall(b"GET / HT")
        other.sendall(b"Host: localhost\r\n\r\n")
        assert other.recv(12) == b"HTTP/1.1 401"


def test_open_pages_are_all_told(page: WebPage, site: Site) -> None:
    """Two hundred pages with their streams of events are open at once, all hear of a snapshot, and others are answered."""
    with ExitStack() as held:
        streams = []
        for _ in range(200):
            one = held.enter_context(socket.create_connection(("127.0.0.1", page.port), 60))
            one.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: {page.cookie}\r\n\r\n".encode())
            streams.append(one.makefile("rb"))
        for stream in streams:
            while b"hello" not in stream.readline():
                pass
        id_ = site.snapshot().encode()
        for stream in streams:
            while id_ not in stream.readline():
                pass
        assert page.ask("/").status == 200


def resident(pid: int) -> int:
    """Return the most memory that a process has had in use, in bytes."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) << 10


def test_a_download_that_is_not_read_takes_no_memory(page: WebPage, site: Site) -> None:
    """A file of 5 GB is sent as it is taken: its size is in no process."""
    with open(site.roots[0] / "large", "wb") as file:
        file.truncate(5 << 30)
        file.seek(5 << 30)
        file.write(b"end")
    site.snapshot()
    target = f"/download?{place(site.roots[0] / 'large')}"
    assert page.ask(target, method="HEAD").headers["content-length"] == str((5 << 30) + 3)
    front = page.front()
    before = resident(front)
    with ExitStack() as held:
        for _ in range(20):
            one = held.enter_context(socket.create_connection(("127.0.0.1", page.port), 60))
            one.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nCookie: {page.cookie}\r\n\r\n".encode())
            assert one.recv(65536)
        assert page.ask("/").status == 200
        assert resident(front) - before < 256 << 20
    assert page.front() == front


# -- contents


def bomb(inner: str, megabytes: int) -> bytes:
    """Return a ZIP archive of a member that is far larger when it is inflated."""
    deflate = zlib.compressobj(wbits=-15)
    zeros = bytes(1 << 20)
    # The same bytes inflate to each megabyte.
    one = deflate.compress(zeros) + deflate.flush(zlib.Z_FULL_FLUSH)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(inner, one * megabytes + deflate.flush())
        (member,) = archive.infolist()
        member.compress_type, member.file_size = zipfile.ZIP_DEFLATED, megabytes << 20
        member.CRC = functools.reduce(lambda crc, _: zlib.crc32(zeros, crc), range(megabytes), 0)
    archive_bytes = bytearray(made.getvalue())
    # The header before the member is written before it.
    struct.pack_into("<H4xL4xL", archive_bytes, 8, member.compress_type, member.CRC, member.file_size)
    return bytes(archive_bytes)


def png(width: int, height: int) -> bytes:
    """Return the beginning of a picture that is large when it is drawn."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        + chunk(b"IEND", b"")
    )


def test_contents_cost_no_more_than_a_preview(page: WebPage, site: Site) -> None:
    """Archives that inflate to gigabytes, headers that promise too much, and pictures that are programs are shown or refused, in bounds."""
    root = site.roots[0]
    pickled = bomb("archive/data.pkl", 2048)
    (root / "bomb.pt").write_bytes(pickled)
    (root / "bomb.npz").write_bytes(pickled.replace(b"archive/data.pkl", b"archive/some.npy"))
    (root / "huge.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{" * 1000)
    nested = b'{"a":' * 200_000
    (root / "deep.safetensors").write_bytes(struct.pack("<Q", len(nested)) + nested)
    (root / "huge.npy").write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", 0xFFFFFFFF) + b"(" * 100_000)
    (root / "large.png").write_bytes(png(1 << 30, 1 << 30))
    (root / "script.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>")
    (root / "html.gif").write_bytes(b"GIF89a<html><script>alert(1)</script>")
    names = sorted(path.name for path in root.iterdir())
    site.snapshot()
    front = page.front()
    for name in names:
        answer = page.ask(f"/files?{place(root / name)}")
        assert answer.status == 200, (name, answer.text)
        assert "The tensors" not in answer.text
        assert ("Show its tensors" in answer.text) == name.endswith(
            (".npz", ".pt", ".safetensors", ".npy")
        ), name
        # What parses them is a process of its own, with limits of its own.
        answer = page.ask(f"/files?{place(root / name)}&tensors=1")
        assert answer.status == 200, (name, answer.text)
        assert "internal error" not in answer.text, name
    assert page.ask(f"/image?{place(root / 'script.svg')}").status == 400
    answer = page.ask(f"/image?{place(root / 'html.gif')}")
    assert answer.headers["content-type"] == "image/gif"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    assert page.front() == front
    assert resident(front) < 700 << 20
