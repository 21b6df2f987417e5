"""Bad input and failing environments: each gets a clear message and the right exit code."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.live import Live, emptied_root, installed
from support.trees import assert_same, manifest

pytestmark = pytest.mark.mount

FAILED, USAGE, NOT_FOUND, EXISTS, NOT_PERMITTED, PARTIAL, BUSY = 1, 2, 3, 6, 7, 8, 75


@pytest.fixture
def root(shared: Live) -> Path:
    """Provide the root of the file's daemon, empty."""
    return emptied_root(shared)


def _refused(live: Live, code: int | set[int], *arguments: str | bytes, says: str = "") -> str:
    """Run a command that must fail with ``code``, a reason on stderr, no traceback, and no output."""
    done = live.run(*arguments, expect=None)
    message = done.stderr.decode()
    codes = {code} if isinstance(code, int) else code
    assert done.returncode in codes, f"{arguments}: {done.returncode}\n{done.stdout.decode()}{message}"
    assert message.strip(), f"{arguments} said nothing"
    assert "Traceback" not in message
    assert says.lower() in message.lower(), message
    return message


def _roots(live: Live) -> list[str]:
    return [root["path"] for root in (live.status() or {"roots": []})["roots"]]


def test_roots_that_cannot_be_protected(shared: Live, root: Path, short_tmp: Path) -> None:
    """Protecting a root inside or around another, a file, a missing path or the repository is refused, and a root twice changes nothing."""
    (root / "inner").mkdir()
    file = short_tmp / "file"
    file.write_text("x")
    _refused(shared, USAGE, "protect", str(root / "inner"), says=str(root))
    _refused(shared, USAGE, "protect", str(shared.top), says=str(shared.top))
    _refused(shared, {USAGE, NOT_FOUND}, "protect", str(short_tmp / "missing"), says="missing")
    _refused(shared, USAGE, "protect", str(file), says="file")
    _refused(shared, USAGE, "protect", str(shared.repository), says="repository")
    config = shared.config.read_bytes()
    shared.run("protect", str(root))
    assert shared.config.read_bytes() == config
    assert _roots(shared) == [str(root)]


def test_a_repository_inside_a_root_must_be_excluded(short_tmp: Path) -> None:
    """Protecting a root with the repository in it is refused: snapshots would contain earlier ones."""
    root = short_tmp / "root"
    root.mkdir()
    top = short_tmp / "c"
    top.mkdir()
    with Live(top, repository=root / "repository") as live:
        _refused(live, USAGE, "protect", str(root), says="repository")


def test_unknown_and_ambiguous_snapshots(shared: Live, root: Path) -> None:
    """An unknown snapshot id exits with 3, and an ambiguous prefix is refused with the ids it matches."""
    _refused(shared, NOT_FOUND, "verify", "cs-000000000000")
    snapshots = [listed.id for listed in shared.list()]
    # At the seventeenth at the latest two ids begin with the same digit.
    while len({snapshot[3] for snapshot in snapshots}) == len(snapshots):
        (root / "n").write_text(str(len(snapshots)))
        snapshots.insert(0, shared.snapshot())
    digits = [snapshot[3] for snapshot in snapshots]
    common = next(digit for digit in digits if digits.count(digit) > 1)
    message = _refused(shared, {USAGE, NOT_FOUND}, "show", f"cs-{common}")
    assert sum(snapshot in message for snapshot in snapshots) >= 2, message
    assert snapshots[0][:9] in shared.run("show", "latest").stdout.decode()


def test_latest_where_there_is_no_snapshot(live: Live, short_tmp: Path) -> None:
    """Listing a repository without snapshots succeeds with no line, and `latest` exits with 3."""
    root = short_tmp / "root"
    root.mkdir()
    live.run("protect", str(root))
    assert live.run("list", "--machine-readable").stdout == b""
    _refused(live, NOT_FOUND, "show", "latest")
    _refused(live, NOT_FOUND, "restore", "-s", "latest~2", "-p", str(root))


def test_a_path_that_is_not_in_the_snapshot(shared: Live, root: Path, short_tmp: Path) -> None:
    """A path that the snapshot lacks, or one outside every root, exits with 3 and writes nothing."""
    (root / "there").write_text("x")
    snapshot = shared.snapshot()
    out = short_tmp / "out"
    for path in (str(root / "not"), "/etc/hostname"):
        _refused(shared, NOT_FOUND, "restore", "-s", snapshot, "-p", path, "-d", str(out), says=path)
    _refused(shared, NOT_FOUND, "show", snapshot, str(root / "not"))
    assert not out.exists() or not any(out.iterdir())


def test_a_destination_that_exists_stops_a_restore_before_it_changes_anything(
    shared: Live, root: Path
) -> None:
    """A restore without --overwrite exits with 6, lists every conflict and touches no file.

    Absent files are not made either.
    """
    for name in ("a", "b", "c"):
        (root / name).write_text("old")
    snapshot = shared.snapshot()
    (root / "a").write_text("new")
    (root / "b").write_text("new")
    (root / "c").unlink()
    before = manifest(root)
    message = _refused(shared, EXISTS, "restore", "-s", snapshot, "-p", str(root))
    assert str(root / "a") in message
    assert str(root / "b") in message
    assert_same(before, manifest(root))


@contextmanager
def _small_disk(place: Path, size: str, *options: str) -> Iterator[Path]:
    """Provide a file system of its own of a given size."""
    place.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "small", place], check=True
    )
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_destination_leaves_no_half_file(shared: Live, root: Path, short_tmp: Path) -> None:
    """A restore that runs out of space says so, and leaves whole files under final names; one to a read-only file system says that."""
    contents = {f"file{number}": os.urandom(1 << 20) for number in range(8)}
    for name, data in contents.items():
        (root / name).write_bytes(data)
    snapshot = shared.snapshot()
    with _small_disk(short_tmp / "small", "3m") as small:
        words = ("restore", "-s", snapshot, "-p", str(root), "-d", str(small))
        _refused(shared, {FAILED, PARTIAL}, *words, says="space")
        # The mark of the unfinished restore stays, so that the next run can continue from there.
        found = {
            path.name: path.read_bytes()
            for path in (small / root.name).iterdir()
            if not path.name.startswith(".ciuic-restore")
        }
        assert found.items() <= contents.items()
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        _refused(shared, {FAILED, NOT_PERMITTED, PARTIAL}, *words, "--overwrite", says="read-only")


def test_a_full_store_never_reaches_the_job(short_tmp: Path) -> None:
    """A snapshot fails with a message if the repository's disk is full, and writes in the root succeed.

    Once there is space again, the next snapshot holds everything.
    """
    top, root = short_tmp / "c", short_tmp / "root"
    top.mkdir()
    root.mkdir()
    with (
        _small_disk(short_tmp / "small", "24m") as small,
        Live(top, repository=small / "repository", impatient=True) as live,
    ):
        live.run("protect", str(root))
        live.start(root)
        (root / "first").write_bytes(os.urandom(2 << 20))
        first = live.snapshot()
        (root / "big").write_bytes(os.urandom(40 << 20))
        done = live.run("snapshot", "--wait", expect=None)
        assert done.returncode not in (0, 2)
        assert "Traceback" not in done.stderr.decode()
        (root / "after").write_bytes(os.urandom(1 << 20))
        assert live.list()[0].id == first
        live.run("verify", first, "--checksum")
        subprocess.run(["mount", "-o", "remount,size=200m", small], check=True)
        second = live.snapshot()
        live.run("restore", "-s", second, "-p", str(root), "-d", str(short_tmp / "out"))
        assert_same(manifest(root), manifest(short_tmp / "out/root"))
        live.stop()


def test_a_second_daemon_refuses_to_start(shared: Live, root: Path) -> None:
    """A second daemon refuses to start and says why; the first continues."""
    _refused(shared, {FAILED, BUSY}, "daemon", says="daemon")
    (root / "file").write_text("still served")
    shared.snapshot()


def test_a_configuration_with_a_typo(live: Live, short_tmp: Path) -> None:
    """An unknown key is refused with file, line and the nearest known key, and so is an impossible value."""
    good = live.config.read_text()
    live.config.write_text(good.replace("interval =", "intervall ="))
    line = next(n for n, text in enumerate(live.config.read_text().splitlines(), 1) if "intervall" in text)
    for command in (("config", "check"), ("protect", str(short_tmp)), ("daemon",)):
        message = _refused(live, USAGE, *command, says="interval")
        assert f"{live.config}:{line}" in message or f"line {line}" in message, message
    live.config.write_text(good.replace('"1h"', '"1 fortnight"'))
    _refused(live, USAGE, "config", "check", says="fortnight")


def test_commands_without_a_daemon_name_its_socket(live: Live) -> None:
    """The commands status and snapshot end with 5 without a daemon, and name the socket."""
    for command in ("status", "snapshot"):
        _refused(live, 5, command, says="control.sock")


def test_wrong_usage_exits_with_2(live: Live) -> None:
    """Unknown commands, unknown options and missing arguments exit with 2."""
    for arguments in (("no-such-command",), ("list", "--no-such-option"), ("restore",), ("verify",)):
        _refused(live, USAGE, *arguments)


def test_an_ordinary_user_is_refused_not_confused(shared: Live, root: Path) -> None:
    """Commands without permission on repository or socket end with 7 and name what may not be opened."""
    (root / "file").write_text("x")
    shared.snapshot()
    others = (shared.repository, shared.top / "run/control.sock")
    for path in others:
        os.chown(path, 65534, 65534)
    # Root without the capability to override permissions: another user may be unable to run this interpreter.
    plain = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    for command, path in zip(("list", "status"), others, strict=True):
        done = subprocess.run(
            [*plain, installed(), command], env=shared.env, cwd="/", check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == NOT_PERMITTED, done.stderr
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr
        os.chown(path, os.geteuid(), os.getegid())


def test_a_busy_repository_exits_with_75_and_names_the_writer(shared: Live, root: Path) -> None:
    """A writing command ends with 75 and names the process that holds the repository's write lock."""
    (root / "file").write_text("x")
    snapshot = shared.snapshot()
    program = (
        "import sys; from pathlib import Path; from ciuic.repository import Repository;"
        "r = Repository.open(Path(sys.argv[1])); w = r.writer(wait_seconds=60).__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [str(installed("python")), "-c", program, str(shared.repository)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        _refused(shared, BUSY, "hold", snapshot, says=str(holder.pid))
        # Readers need no lock.
        shared.run("verify", snapshot, "--checksum")
    finally:
        holder.communicate(timeout=30)
    shared.run("hold", snapshot)


def test_words_that_are_not_utf_8(shared: Live) -> None:
    """A message and a reason from a Latin-1 terminal are kept, with their bytes escaped; ciuic's own tags are refused."""
    snapshot = shared.run("snapshot", "--wait", "-m", b"caf\xe9").stdout.decode().strip()
    shared.run("hold", snapshot, "-m", b"bl\xe9")
    shown = shared.json("show", snapshot)
    assert shown["message"] == "caf\\xe9"
    assert b"bl\\xe9" in shared.run("show", snapshot).stdout
    _refused(shared, USAGE, "snapshot", "--tag", "safety", says="safety")
    _refused(shared, USAGE, "snapshot", "--tag", b"\xe9 x", says="tag")
