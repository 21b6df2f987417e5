"""Attacker: a user with a link on the way to where root restores lazily, or with a planted file there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.restoring import take, write

from ciuic.errors import CiuicError
from ciuic.lazy.service import MARKER, LazyLayout, LazyRestore
from ciuic.repository import Repository

USER = 12345


@pytest.mark.mount
@pytest.mark.parametrize("by", ["original path", "destination"])
def test_a_link_of_another_user_chooses_no_place(tmp_path: Path, by: str) -> None:
    """A lazy restore, like any other, does not go through a link of a user into a directory of root."""
    tmp_path.chmod(0o755)
    users, secret = tmp_path / "users", tmp_path / "secret"
    secret.mkdir()
    users.mkdir()
    (users / "x").mkdir()
    write(users / "x/run/file", b"payload")
    with Repository.create(tmp_path / "repository") as repository:
        snapshot = take(repository, users / "x/run")
        os.rename(users / "x", users / "moved")
        (users / "x").symlink_to(secret)
        os.chown(users / "x", USER, USER, follow_symlinks=False)
        restore = LazyRestore(
            repository,
            snapshot,
            os.fsencode(users / "x/run"),
            None if by == "original path" else os.fsencode(users / "x"),
            status_directory=tmp_path / "status",
        )
        with pytest.raises(CiuicError, match="leads through a symbolic link of user 12345"):
            restore.run()
    assert not list(secret.iterdir())


@pytest.mark.parametrize("plant", [os.link, os.symlink])
def test_a_planted_marker_is_replaced(tmp_path: Path, plant: object) -> None:
    """A hard or symbolic link in the marker's place is removed, and what it leads to is not written to."""
    place, secret = tmp_path / "restored", tmp_path / "secret"
    place.mkdir()
    secret.write_bytes(b"of root alone")
    marker = place / os.fsdecode(MARKER)
    plant(secret, marker)  # type: ignore[operator]
    fd = os.open(place, os.O_RDONLY)
    layout = LazyLayout(fd, os.fsencode(place))
    try:
        layout.mark()
    finally:
        layout.close()
        os.close(fd)
    assert secret.read_bytes() == b"of root alone"
    assert marker.read_text().startswith("This directory is being restored")
    assert (marker.is_symlink(), marker.stat().st_nlink) == (False, 1)
