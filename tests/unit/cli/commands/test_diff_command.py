"""`ciuic diff` on real repositories and real directories."""

from __future__ import annotations

import json
import stat

from support.cli_repository import FIRST_NS, NOISE, CliRepository
from support.cli_repository import repository as repository

from ciuic.types import Entry


def test_diff_of_two_snapshots(repository: CliRepository) -> None:
    """Added, removed, changed and retyped paths are listed, each with its sign; equal files are not."""
    link = Entry(name=b"", mode=stat.S_IFLNK | 0o777, target=b"x", mtime_ns=FIRST_NS)
    repository.snapshot({b"ckpt": {b"a": NOISE[::-1], b"b": b"bbb", b"c": b"new"}, b"log": link})
    root = repository.root
    result = repository.run("diff", "latest~1", "latest")
    signs = {line.split("  ")[0][2:]: line[0] for line in result.stdout.splitlines()}
    assert signs[str(root / "ckpt" / "a")] == "M"
    assert signs[str(root / "ckpt" / "c")] == "+"
    assert signs[str(root / "log")] == "T"
    assert str(root / "ckpt" / "b") not in signs
    back = repository.run("diff", "latest", "latest~1", "-p", str(root / "ckpt" / "c"), "--json")
    (change,) = json.loads(back.stdout)["changes"]
    assert (change["kind"], change["path"]) == ("removed", str(root / "ckpt" / "c"))
    assert change["old"]["size_bytes"] == 3


def test_diff_with_now(repository: CliRepository) -> None:
    """Diff with one id compares with the live files."""
    repository.run("restore", "-s", "latest", "-p", str(repository.root))
    (repository.root / "ckpt" / "b").write_bytes(b"BBB")
    (repository.root / "stray").write_bytes(b"")
    changes = json.loads(repository.run("diff", "latest", "--json").stdout)["changes"]
    kinds = {change["path"]: change["kind"] for change in changes}
    assert kinds[str(repository.root / "ckpt" / "b")] == "changed"
    assert kinds[str(repository.root / "stray")] == "added"
    assert str(repository.root / "ckpt" / "a") not in kinds
