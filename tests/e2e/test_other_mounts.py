"""Mounts by which a root is reached past its overlay: their writes are in every snapshot, and they are named."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.live import Live
from support.until import until

pytestmark = pytest.mark.mount

_SHELL = (
    'set -e; mount --bind "$1" "$2"; echo ready; '
    'while read -r name text; do printf %s "$text" > "$2/$name"; echo done; done'
)


class Container:
    """Shell in a mount namespace of its own, with a directory bind-mounted as container engines do it."""

    def __init__(self, source: Path, place: Path, propagation: str = "private") -> None:
        self.place = place
        self.process = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--propagation",
                propagation,
                "sh",
                "-c",
                _SHELL,
                "sh",
                str(source),
                str(place),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        self._answered("ready")

    def write(self, name: str, text: str) -> None:
        """Write a file in the container."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {text}\n")
        self.process.stdin.flush()
        self._answered("done")

    def _answered(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def end(self) -> None:
        """End the shell, and with it the mount namespace."""
        self.process.communicate(timeout=30)


@contextmanager
def _container(source: Path, place: Path, propagation: str = "private") -> Iterator[Container]:
    place.mkdir(exist_ok=True)
    container = Container(source, place, propagation)
    try:
        yield container
    finally:
        if container.process.poll() is None:
            container.end()


def _root(live: Live) -> dict[str, object]:
    status = live.status()
    assert status is not None
    (root,) = status["roots"]
    return dict(root)


@pytest.mark.parametrize("part", [".", "data", ".."], ids=["the root", "a part of it", "above it"])
def test_writes_of_an_older_container_are_in_every_snapshot(live: Live, root: Path, part: str) -> None:
    """A container from before `protect` writes past the overlay: it is named, and no snapshot misses its writes."""
    (root / "data").mkdir()
    file = root / "data" / "file"
    file.write_text("first")
    live.start()
    with _container((root / part).resolve(), live.top / "inside") as container:
        inside = str(file.relative_to((root / part).resolve()))
        said = live.json("protect", str(root))
        (named,) = [
            one
            for one in said["roots"][0]["bypassing_mounts"]
            if one["place"].startswith(str(container.place))
        ]
        assert named["elsewhere"]
        live.wait_mounted(root)
        until("the first snapshot", live.list)
        for text in ("second", "third"):
            container.write(inside, text)
            snapshot = live.snapshot()
            live.run("restore", "-s", snapshot, "-p", str(file), "-d", str(live.top / text))
            assert [path.read_text() for path in (live.top / text).rglob("file")] == [text]
        status = _root(live)
        assert not status["tracking"]
        mounts = status["bypassing_mounts"]
        assert isinstance(mounts, list)
        assert str(container.place) in str(mounts)
        for command in ("status", "doctor"):
            shown = live.run(command, expect=None).stdout.decode()
            assert "without passing the overlay" in shown
        container.write(inside, "last")
        container.end()
    # What it wrote last is in a snapshot that compares everything; from the next one on tracking counts again.
    snapshot = live.snapshot()
    live.run("restore", "-s", snapshot, "-p", str(file), "-d", str(live.top / "last"))
    assert [path.read_text() for path in (live.top / "last").rglob("file")] == ["last"]
    status = _root(live)
    assert status["tracking"]
    assert status["bypassing_mounts"] == []
    assert b"without passing" not in live.run("status").stdout


def test_a_container_started_later_passes_the_overlay(live: Live, root: Path) -> None:
    """A container that is started when the root is protected has the overlay, and tracking is trusted."""
    (root / "file").write_text("first")
    live.run("protect", str(root))
    live.start(root)
    until("the first snapshot", live.list)
    with _container(root, live.top / "inside") as container:
        container.write("file", "second")
        snapshot = live.snapshot()
        status = _root(live)
        assert status["tracking"]
        assert status["bypassing_mounts"] == []
    live.run("restore", "-s", snapshot, "-p", str(root), "-d", str(live.top / "restored"))
    assert (live.top / "restored" / root.name / "file").read_text() == "second"


def test_a_slave_of_the_host_receives_the_overlay(live: Live, root: Path) -> None:
    """A container whose mounts are slaves of shared ones (`rslave`) gets the overlay, though it is older."""
    above = live.top / "above"
    above.mkdir()
    subprocess.run(["mount", "--bind", above, above], check=True, timeout=30)
    subprocess.run(["mount", "--make-shared", above], check=True, timeout=30)
    try:
        inner = above / "root"
        inner.mkdir()
        live.start()
        with _container(above, live.top / "inside", "slave") as container:
            said = live.json("protect", str(inner))
            assert said["roots"][0]["bypassing_mounts"] == []
            live.wait_mounted(inner)
            until("the first snapshot", live.list)
            container.write("root/file", "from inside")
            assert (inner / "file").read_text() == "from inside"
            live.snapshot()
            status = _root(live)
            assert status["tracking"]
            assert status["bypassing_mounts"] == []
        live.run("unprotect", str(inner))
    finally:
        live.close()
        subprocess.run(["umount", "-l", above], check=False, timeout=30, capture_output=True)
