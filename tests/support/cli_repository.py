"""Real repository for the tests of commands, filled through the Writer with trees given as dictionaries."""

from __future__ import annotations

import copy
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Union

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.live import Live

from ciuic.cli.app import cli
from ciuic.repository import Repository, Writer, is_zero
from ciuic.types import HOLE, Entry, RootMode, RootRecord, SnapshotDraft, SnapshotId, TreeRef

Tree = Mapping[bytes, Union[bytes, tuple[bytes, dict[str, Any]], "Tree", Entry]]
"""Map from name to the content of a file (and fields of its entry), another directory, or a ready entry."""

NOISE = os.urandom(300_000)
SECOND_NS = 1_000_000_000
FIRST_NS = 1_686_834_000 * SECOND_NS
"""Cut of the first snapshot, 2023-06-15 13:00:00 UTC; each further one is an hour later."""


def store_file(writer: Writer, block_size: int, name: bytes, content: bytes, **fields: Any) -> Entry:
    """Store a file and return its entry; zero blocks are holes."""
    blocks = {}
    for number, offset in enumerate(range(0, len(content), block_size)):
        block = content[offset : offset + block_size]
        blocks[number] = HOLE if is_zero(block) else writer.put_chunk(block)
    ref = writer.update_block_map((b"", 0), len(blocks), blocks)
    values: dict[str, Any] = {
        "mode": stat.S_IFREG | 0o644,
        "uid": os.geteuid(),
        "gid": os.getegid(),
        "mtime_ns": FIRST_NS,
        "size_bytes": len(content),
        "content": ref.content,
        "map_height": ref.map_height,
    }
    return Entry(name=name, **values | fields)


def store_tree(writer: Writer, block_size: int, tree: Tree) -> TreeRef:
    """Store a directory and everything below it; return its entry."""
    changes: dict[bytes, Entry | None] = {}
    for name, what in tree.items():
        if isinstance(what, Entry):
            changes[name] = msgspec.structs.replace(what, name=name)
        elif isinstance(what, bytes):
            changes[name] = store_file(writer, block_size, name, what)
        elif isinstance(what, tuple):
            changes[name] = store_file(writer, block_size, name, what[0], **what[1])
        else:
            below = store_tree(writer, block_size, what)
            changes[name] = directory(name, below)
    return writer.update_tree(b"", changes)


def directory(name: bytes, below: TreeRef) -> Entry:
    return Entry(
        name=name,
        mode=stat.S_IFDIR | 0o755,
        uid=os.geteuid(),
        gid=os.getegid(),
        mtime_ns=FIRST_NS,
        content=below.id,
        total_files=below.total_files,
        total_bytes=below.total_bytes,
    )


class CliRepository:
    """Repository, and the program run on it."""

    def __init__(self, path: Path, root: Path, *, make: bool = True) -> None:
        if make:
            Repository.create(path).close()
        self.path = path
        self.root = root
        """The one protected directory; it need not exist."""
        self.count = 0

    def snapshot(
        self,
        tree: Tree,
        *,
        id_: str = "",
        time_ns: int = 0,
        not_held: int = 0,
        mode: RootMode = "offline",
        **fields: Any,
    ) -> SnapshotId:
        """Commit a snapshot of ``tree`` as the root; ``not_held`` and ``mode`` as in ``RootRecord``."""
        with Repository.open(self.path) as repository, repository.writer() as writer:
            below = store_tree(writer, repository.block_size, tree)
            draft = SnapshotDraft(
                id=SnapshotId.parse(id_ or f"cs-{self.count + 1:06x}"),
                time_ns=time_ns or FIRST_NS + self.count * 3600 * SECOND_NS,
                host="testhost",
                roots=(
                    RootRecord(
                        path=os.fsencode(self.root),
                        entry=directory(b"", below),
                        mode=mode,
                        not_held=not_held,
                    ),
                ),
                **fields,
            )
            self.count += 1
            return writer.commit(draft).id

    def run(self, *arguments: str | bytes, **kwargs: Any) -> Result:
        """Run ``ciuic --repo … arguments``; bytes are arguments as a shell would pass them."""
        words = [os.fsdecode(argument) for argument in arguments]
        # The file /dev/null is an empty configuration: the machine's own must not affect a test.
        environment = {
            "CIUIC_CONFIG": "/dev/null",
            "CIUIC_REPO": str(self.path),
            "XDG_STATE_HOME": f"{self.path}.state",
        } | kwargs.pop("env", {})
        return CliRunner().invoke(cli, words, env=environment, **kwargs)


class Host(Live):
    """One host: configuration, key file, repository and state of the upload below a directory of its own."""

    forks_commands = True

    def __init__(self, top: Path) -> None:
        top.mkdir()
        super().__init__(top)
        self.state = top / "upload"
        self.env["CIUIC_UPLOAD_STATE"] = str(self.state)
        for name in ("PASSPHRASE", "KEY_FILE", "RECOVERY_KEY"):
            self.env.pop(f"CIUIC_REMOTE_{name}", None)
        self.key_file = top / "remote-remote.key"

    def snapshot_of(self, *contents: bytes | Tree) -> str:
        """Commit a snapshot of each tree, or of one file with this content, without a daemon; return the id of the last."""
        made = CliRepository(self.repository, self.top / "root", make=False)
        with Repository.open(self.repository) as repository:
            made.count = len(repository.snapshots.names())
        trees = ({b"file": one} if isinstance(one, bytes) else one for one in contents)
        return [str(made.snapshot(tree)) for tree in trees][-1]

    def identity(self) -> Any:
        with Repository.open(self.repository) as repository:
            return repository.identity

    def fails(self, *arguments: str, code: int) -> str:
        """Run a command that must fail with this code, and return what it said."""
        return self.run(*arguments, expect=code).stderr.decode()


class MadeHost:
    """Host that is made once, with what lies beside its directory, and given to each test as it was made."""

    def __init__(self, place: Path, make: Callable[[Host], object]) -> None:
        self._whole = place / "whole"
        (place / "used").mkdir()
        self._host = Host(place / "used/one")
        # A reader whose cache knows later states refuses an earlier one.
        self._host.env["XDG_CACHE_HOME"] = str(self._host.top / "cache")
        make(self._host)
        shutil.copytree(place / "used", self._whole, symlinks=True)

    def again(self) -> Host:
        """Return the host as it was made, in the same place."""
        used = self._host.top.parent
        shutil.rmtree(used)
        shutil.copytree(self._whole, used, symlinks=True)
        return copy.deepcopy(self._host)


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    """Make one snapshot of root/ckpt/{a,b} and root/log; root exists and is empty."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    made.snapshot({b"ckpt": {b"a": NOISE, b"b": b"bbb"}, b"log": b"line\n"})
    return made
