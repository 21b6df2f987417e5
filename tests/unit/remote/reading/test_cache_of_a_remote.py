"""Cache of a remote: where it lies, who may own it, and how large it grows."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.remote_host import RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.errors import NotPermitted
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.reading.cache_directory import ROOT_CACHE, CacheDirectory, cache_root, open_cache
from ciuic.system.ownership import temporary_directory


@pytest.fixture
def remote() -> Iterator[Remote]:
    """Provide an empty remote."""
    name = f"cache-{os.urandom(6).hex()}"
    yield new_remote(MemoryObjects(name))
    forget_bucket(name)


def test_it_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_CACHE_HOME counts where it is absolute; else root has /var/cache, and others their home."""
    assert cache_root({"XDG_CACHE_HOME": "/x", "HOME": "/home/u"}) == Path("/x/ciuic/remotes")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cache_root({"XDG_CACHE_HOME": "x", "HOME": "/root"}) == ROOT_CACHE
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cache_root({"HOME": "/home/u"}) == Path("/home/u/.cache/ciuic/remotes")


def test_the_cache_is_private(remote: Remote, tmp_path: Path) -> None:
    """Directories are made with mode 0700, files with 0600; a directory that others may enter is closed."""
    with open_cache(remote, remote, tmp_path / "a") as cache:
        cache.store("one", b"1")
        path = cache.path
    os.chmod(path, 0o755)
    with open_cache(remote, remote, tmp_path / "a") as cache:
        assert cache.load("one") == b"1"
    for made in [path, *path.rglob("*")]:
        assert stat.S_IMODE(made.stat().st_mode) == (0o700 if made.is_dir() else 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_nothing_is_made_where_another_user_leads(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links of another user lead to no new directory, and a TMPDIR below another user's directory is not used."""
    theirs, elsewhere = tmp_path / "theirs", tmp_path / "elsewhere"
    theirs.mkdir()
    elsewhere.mkdir()
    (theirs / "cache").symlink_to(elsewhere)
    (theirs / "tmp").mkdir(mode=0o700)
    os.lchown(theirs / "cache", 1234, 1234)
    os.chown(theirs, 1234, 1234)
    for root in (theirs, theirs / "cache"):
        with pytest.raises(NotPermitted), open_cache(remote, remote, root):
            pass
    assert os.listdir(elsewhere) == []
    assert sorted(os.listdir(theirs)) == ["cache", "tmp"]
    monkeypatch.setattr(tempfile, "tempdir", str(theirs / "tmp"))
    assert temporary_directory() in ("/var/tmp", "/tmp")
    # A file where the cache should be: one that is deleted at the end takes its place.
    (tmp_path / "file").write_bytes(b"")
    with open_cache(remote, remote, tmp_path / "file") as cache:
        assert cache.path.parent in (Path("/var/tmp"), Path("/tmp"))
    assert os.listdir(theirs / "tmp") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_that_of_another_user_is_refused(remote: Remote, tmp_path: Path) -> None:
    """A cache below a directory that another user owns or may write to is refused with words."""
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 1234, 1234)
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    for name in ("theirs", "open"):
        with (
            pytest.raises(NotPermitted, match="must be this user's own"),
            open_cache(remote, remote, tmp_path / name),
        ):
            pass


def test_it_is_done_without_where_the_disk_refuses(remote: Remote, tmp_path: Path) -> None:
    """Where no cache can be made, a temporary directory stands for it, and is gone afterwards."""
    (tmp_path / "file").write_bytes(b"")
    host = RemoteHost(tmp_path / "host", remote)
    write(host.root / "a", b"content")
    host.snapshot()
    host.upload()
    with open_cache(remote, remote, tmp_path / "file") as cache:
        assert cache.path.is_dir()
        cache.store("one", b"1")
    assert not cache.path.exists()


def test_it_stays_within_its_limit(tmp_path: Path) -> None:
    """What was not used for the longest time goes first; what was just used stays."""
    cache = CacheDirectory(tmp_path, limit_bytes=1000)
    for number in range(9):
        cache.store(f"{number}", b"x" * 100)
        os.utime(tmp_path / "objects" / f"{number}", ns=(number, number))
    assert cache.load("0") is not None
    cache.store("large", b"x" * 350)
    kept = {path.name for path in (tmp_path / "objects").iterdir()}
    assert kept == {"0", "large", *map(str, range(4, 9))}
    assert cache.load("3") is None


def test_each_process_has_an_index_of_its_own(tmp_path: Path) -> None:
    """Index files that are open are not given to others; beyond four there is none."""
    cache = CacheDirectory(tmp_path)
    opened = [cache.index_path() for _ in range(5)]
    paths = [one.__enter__() for one in opened]
    assert len(set(paths)) == 5
    assert paths[4] is None
    opened[1].__exit__(None, None, None)
    with cache.index_path() as again:
        assert again == paths[1]
    for at in (0, 2, 3, 4):
        opened[at].__exit__(None, None, None)


def test_readers_share_the_cache(remote: Remote, tmp_path: Path) -> None:
    """Two readers at once, and one after them, read everything; the last one asks for no manifest and no meta pack."""
    host = RemoteHost(tmp_path / "host", remote)
    write(host.root / "a", os.urandom(30_000))
    host.snapshot()
    host.upload()
    with reading(remote, tmp_path / "cache") as one, reading(remote, tmp_path / "cache") as two:
        for opened in (one, two):
            assert verify_snapshots(opened.repositories[0]).damages == []
    asked = []

    class Noting(MemoryObjects):
        def get(self, name: str) -> bytes:
            asked.append(name)
            return super().get(name)

    noting = Noting(remote.objects.url.removeprefix("memory://"))
    with reading(remote._replace(objects=noting), tmp_path / "cache") as opened:
        assert verify_snapshots(opened.repositories[0]).damages == []
    assert [name for name in asked if name.startswith(("manifests/", "packs/"))] == []
