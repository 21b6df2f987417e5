"""A directory as a remote: nothing torn, nothing through links, and a file system that is not mounted."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.objects.model import NoSuchObject, RemoteRefused, RemoteUnreachable
from ciuic.repository.identity import Bytes
from ciuic.system.disk import Disk


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def objects(top: Path) -> DirectoryObjects:
    return DirectoryObjects(str(top), make=True)


class FailingDisk(Disk):
    """Disk on which one operation fails."""

    def __init__(self, operation: str, error: int) -> None:
        self._operation = operation
        self._error = error

    def write_at(self, fd: int, parts: Iterable[Bytes], offset: int) -> int:
        end = super().write_at(fd, [b"torn"], offset) if self._operation == "write" else 0
        self._fail("write")
        return end or super().write_at(fd, parts, offset)

    def sync(self, fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            self._fail("sync")
        super().sync(fd)

    def _fail(self, operation: str) -> None:
        if operation == self._operation:
            raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize(
    ("error", "kind"), [(5, RemoteUnreachable), (28, RemoteRefused), (116, RemoteUnreachable)]
)
def test_a_failed_write_leaves_what_was_there(
    objects: DirectoryObjects, top: Path, operation: str, error: int, kind: type[Exception]
) -> None:
    """When a write or a sync fails, the old object stays, a new name stays free, and no file is left."""
    objects.put("old", [b"content"])
    failing = DirectoryObjects(str(top), disk=FailingDisk(operation, error))
    for call in (
        lambda: failing.put("old", [b"other"]),
        lambda: failing.put("new", [b"other"]),
        lambda: failing.create("created", b"other"),
    ):
        with pytest.raises(kind, match=os.strerror(error)):
            call()
    assert [info.name for info in objects.list("")] == ["old"]
    assert objects.get("old") == b"content"
    assert os.listdir(top / ".incoming") == []


_KILLED = """
import sys
from ciuic.remote.objects.directory_objects import DirectoryObjects
objects = DirectoryObjects(sys.argv[1])
print("begun", flush=True)
for number in range(10**6):
    objects.put(f"packs/{number % 3}", [bytes([number % 251]) * 200_000] * 5)
    objects.create(f"w/{number:010}", bytes([number % 251]) * 200)
"""


def test_a_killed_writer_leaves_whole_objects(objects: DirectoryObjects, top: Path) -> None:
    """After SIGKILL at any moment there are whole objects alone, and what the writer left is removed a day later."""
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", _KILLED, str(top)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"begun\n"
            before = len(list(objects.list("w/")))
            # It is writing: another object is there.
            while len(list(objects.list("w/"))) <= before and writer.poll() is None:
                pass
            writer.send_signal(signal.SIGKILL)
        infos = list(objects.list(""))
        for info in infos:
            data = objects.get(info.name)
            assert len(data) == info.size_bytes == (1_000_000 if info.name.startswith("packs/") else 200)
            assert data == data[:1] * len(data)
        objects.delete([info.name for info in infos if info.name.startswith("w/")])
    incoming = top / ".incoming"
    stale = incoming / "0123"
    stale.write_bytes(b"x")
    for file in incoming.iterdir():
        os.utime(file, (1000, 1000))
    (incoming / "fresh").write_bytes(b"x")
    DirectoryObjects(str(top)).put("a", [b"x"])
    assert os.listdir(incoming) == ["fresh"]


def test_a_file_system_that_is_not_mounted(
    objects: DirectoryObjects, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root that is gone, or on another device, is unreachable, and nothing is written in its place."""
    objects.put("name", [b"x"])
    with monkeypatch.context() as patch:
        patch.setattr(objects, "_device", objects._device + 1)
        with pytest.raises(RemoteUnreachable, match="is it mounted"):
            objects.put("name", [b"y"])
    top.rename(top.with_name("unmounted"))
    for call in (
        lambda: objects.put("name", [b"y"]),
        lambda: objects.create("name", b"y"),
        lambda: objects.get("name"),
        lambda: objects.info("name"),
        lambda: list(objects.list("")),
        lambda: objects.delete(["name"]),
        lambda: DirectoryObjects(str(top)),
    ):
        with pytest.raises(RemoteUnreachable):
            call()
    assert not top.exists()


def test_links_are_not_followed(objects: DirectoryObjects, top: Path, tmp_path: Path) -> None:
    """Somebody who may write to the directory cannot have files elsewhere read, listed, written or deleted."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "name").write_bytes(b"not an object")
    (top / "dir").symlink_to(outside)
    (top / "file").symlink_to(outside / "name")
    os.mkfifo(top / "pipe")
    for call in (
        lambda: objects.get("dir/name"),
        lambda: objects.put("dir/name", [b"x"]),
        lambda: objects.put("dir/new", [b"x"]),
        lambda: objects.create("dir/new", b"x"),
        lambda: objects.delete(["dir/name"]),
        lambda: objects.get("file"),
        lambda: objects.get("pipe"),
        lambda: objects.info("pipe"),
    ):
        with pytest.raises((RemoteRefused, RemoteUnreachable, NoSuchObject, DamagedRemote)):
            call()
    assert list(objects.list("")) == []
    assert not objects.create("file", b"x")
    objects.put("file", [b"x"])
    assert objects.get("file") == b"x"
    assert [path.name for path in outside.iterdir()] == ["name"]
    assert (outside / "name").read_bytes() == b"not an object"


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o2770])
def test_permissions_are_those_of_the_root(top: Path, mode: int) -> None:
    """Files and directories can be read and written by whom the root is for, whatever the umask."""
    top.mkdir()
    top.chmod(mode)
    old = os.umask(0o077)
    try:
        objects = DirectoryObjects(str(top))
        objects.put("packs/data/00/a", [b"x"])
        objects.create("w/a/0", b"x")
    finally:
        os.umask(old)
    for path in top.rglob("*"):
        expected = mode & 0o777 if path.is_dir() else mode & 0o666
        assert stat.S_IMODE(path.stat().st_mode) & 0o777 == expected, path


def test_a_file_system_without_links_is_refused(
    objects: DirectoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where link(2) does not work, create refuses with words instead of an object that could be torn."""

    def link(*_arguments: object, **_options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(RemoteRefused, match="has no hard links"):
        objects.create("name", b"x")
    assert objects.info("name") is None


def test_a_link_whose_reply_was_lost_has_created(
    objects: DirectoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS a link that was done may be answered with "exists"; the count of links tells whose it is."""
    link = os.link

    def link_twice(*arguments: object, **options: object) -> None:
        link(*arguments, **options)  # type: ignore[arg-type]
        raise FileExistsError(17, "File exists")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link_twice)
        assert objects.create("name", b"mine")
    assert objects.get("name") == b"mine"
    assert not objects.create("name", b"other")


def test_directories_that_come_and_go(objects: DirectoryObjects, top: Path) -> None:
    """Hosts that delete the last object of a directory while others put the next one there lose none."""
    others = [DirectoryObjects(str(top)) for _ in range(4)]
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        mine = others[number]
        barrier.wait(30)
        for turn in range(60):
            name = f"a/b/c/{number}-{turn}"
            if turn % 2:
                mine.put(name, [b"x"])
            else:
                assert mine.create(name, b"x")
            assert mine.get(name) == b"x"
            mine.delete([name])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert list(objects.list("")) == []
    assert sorted(os.listdir(top)) == [".incoming"]


_PARTS = st.lists(st.sampled_from(["a", "b", "a.b", "a-b", "ab", "0", "A_"]), min_size=1, max_size=3)


@given(st.sets(_PARTS.map("/".join), max_size=12), st.text("ab./-", max_size=4), _PARTS.map("/".join))
def test_a_listing_is_ordered_by_bytes(tmp_path: Path, names: set[str], prefix: str, after: str) -> None:
    """Names come in the order of their bytes across directories; prefix and ``after`` cut at any place."""
    # A name that is another one's directory is none.
    names = {name for name in names if not any(other.startswith(name + "/") for other in names)}
    objects = DirectoryObjects(f"{tmp_path}/listing", make=True)
    objects.delete([info.name for info in objects.list("")])
    for name in names:
        objects.put(name, [b""])
    (tmp_path / "listing/.snapshot").mkdir(exist_ok=True)
    (tmp_path / "listing/.snapshot/a").write_bytes(b"not an object")
    assert [info.name for info in objects.list("")] == sorted(names)
    wanted = sorted(name for name in names if name.startswith(prefix) and name > after)
    assert [info.name for info in objects.list(prefix, after=after)] == wanted
