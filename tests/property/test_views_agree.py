"""Every view of a history agrees with a model of it: lists, listings, searches, differences, sums, plans, mounts, the page.

Random operations change a directory with names that are hard to quote; manifests of it at each snapshot are the model.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import xxhash
from hypothesis import settings
from support import trees
from support.cli_repository import CliRepository
from support.restoring import take
from support.trees import Facts, Manifest
from support.until import until

from ciuic.cli.commands.web.reading import Catalogue, Reading
from ciuic.cli.shared.session import Session
from ciuic.fuse_layer.system import mounts
from ciuic.repository import Repository
from ciuic.types import Snapshot
from ciuic.view.tree import snapshot_name

pytestmark = pytest.mark.mount
_SNAPSHOTS, _OPERATIONS, _LOOKS = 60, 500, 8
_NAMES = [
    *(name for name in trees.ODD_NAMES if name != trees.LONG_NAME),
    b"a", b"b", b".hidden", b"-", b"--help", b"*", b"[x]", b"?", b"#", b"%20", b"%", b"&amp;", b"<b>", b"~", b"$HOME",
    b"a:b", b"a=b", b"a,b", b"a;b", b"a\\b", b"a\tb", b"\x1b[31m", b"\xc3\xa9", b"e\xcc\x81", b"\xe2\x80\xae", b"NUL", b"con.",
    b"trailing.", b" ", b"latest", b"set:a", b"{x}", b"!",
]  # fmt: skip


class History:
    """A directory, its snapshots, and its manifest at each of them, oldest first."""

    def __init__(self, top: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root = os.fsencode(top) + b"/root"
        os.mkdir(self.root)
        self.cli = CliRepository(top / "repository", Path(os.fsdecode(self.root)))
        self.snapshots: list[Snapshot] = []
        self.models: list[Manifest] = []
        for number in range(_SNAPSHOTS):
            for _ in range(_OPERATIONS * (number + 1) // _SNAPSHOTS - _OPERATIONS * number // _SNAPSHOTS):
                self._change()
            with Repository.open(self.cli.path) as repository:
                self.snapshots.append(take(repository, Path(os.fsdecode(self.root))))
            self.models.append(trees.manifest(self.root))

    def json(self, *words: str | bytes, code: int = 0) -> Any:
        done = self.cli.run(words[0], "--json", *words[1:])
        assert done.exit_code == code, (words, done.output)
        return json.loads(done.stdout)

    def absolute(self, path: bytes) -> bytes:
        return self.root if path == b"." else self.root + b"/" + path

    def at(self, number: int) -> tuple[str, Manifest]:
        """Return the id and the model of a snapshot, which may be counted from the newest."""
        return str(self.snapshots[number].id), self.models[number]

    def some(self) -> Iterator[tuple[str, Manifest]]:
        """Yield some snapshots, the oldest and the newest among them."""
        chosen = {0, _SNAPSHOTS - 1, *self.random.sample(range(_SNAPSHOTS), _LOOKS)}
        return (self.at(number) for number in sorted(chosen))

    def paths(self) -> list[bytes]:
        """Return each path of a file or another thing that is no directory, at any time, and was never one."""
        ever = {path for model in self.models for path in model}
        return sorted(
            path for path in ever if all(is_file(model[path]) for model in self.models if path in model)
        )

    def _change(self) -> None:
        choose = self.random.choice
        folders = [path for path, facts in trees.manifest(self.root).items() if not is_file(facts)]
        folder = os.path.normpath(os.path.join(self.root, choose(folders)))
        place, other = (os.path.join(folder, choose(_NAMES)) for _ in range(2))
        what = choose(
            [
                "write",
                "write",
                "write",
                "grow",
                "mkdir",
                "symlink",
                "link",
                "rename",
                "remove",
                "chmod",
                "fifo",
            ]
        )
        try:
            if what == "write":
                # Never through a link.
                fd = os.open(
                    place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
                )
                with open(fd, "wb") as file:
                    file.write(self.random.randbytes(self.random.randrange(9000)))
            elif what == "grow":
                fd = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
                with open(fd, "ab") as file:
                    file.write(b"more")
            elif what == "mkdir":
                if folder.count(b"/") < self.root.count(b"/") + 3:
                    os.mkdir(place)
            elif what == "symlink":
                os.symlink(choose(_NAMES), place)
            elif what == "link":
                os.link(other, place, follow_symlinks=False)
            elif what == "rename":
                os.rename(other, place)
            elif what == "chmod":
                if not os.path.islink(place):
                    os.chmod(place, choose([0o600, 0o755]))
            elif what == "fifo":
                os.mkfifo(place)
            elif os.path.isdir(place) and not os.path.islink(place):
                shutil.rmtree(place)
            else:
                os.unlink(place)
        except OSError:
            # The step does not fit what is there.
            return


def is_file(facts: Facts) -> bool:
    return facts.kind != stat.S_IFDIR


def exact(document: dict[str, Any], key: str = "path") -> bytes:
    """Return a name of a document, byte for byte."""
    encoded = document.get(f"{key}_base64")
    return base64.b64decode(encoded) if encoded else document[key].encode()


def names_of(model: Manifest) -> set[bytes]:
    return {path for path, facts in model.items() if is_file(facts)}


def stored(model: Manifest) -> tuple[int, int]:
    """Return the number of files and the bytes that a snapshot stores: each file once, whatever the number of its names."""
    files = {facts.same_inode_as: facts for facts in model.values() if is_file(facts)}
    return len(files), sum(facts.size_bytes for facts in files.values() if facts.kind == stat.S_IFREG)


@pytest.fixture(scope="module", params=range(max(1, settings().max_examples // 250)))
def _history(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> History:
    return History(tmp_path_factory.mktemp("views"), seed=20261128 + request.param)


@pytest.fixture
def history(_history: History) -> History:
    """Return the history; what a test chooses in it does not depend on the tests before."""
    _history.random.seed(1)
    return _history


def test_lists_and_sums_agree(history: History) -> None:
    """`list`, `show`, `stats` and `verify` have the snapshots, their files and their bytes."""
    wanted = [
        (str(one.id), *stored(model)) for one, model in zip(history.snapshots, history.models, strict=True)
    ][::-1]
    listed = history.json("list")["snapshots"]
    assert [(one["id"], one["files"], one["size_bytes"]) for one in listed] == wanted
    lines = history.cli.run("list", "--machine-readable").stdout.splitlines()
    assert [(line.split("|")[0], int(line.split("|")[2])) for line in lines] == [
        (id_, size) for id_, _, size in wanted
    ]
    sums = history.json("stats")
    assert [(one["id"], one["size_bytes"]) for one in sums["snapshots"]] == [
        (id_, size) for id_, _, size in wanted
    ]
    for id_, model in history.some():
        verified = history.json("verify", id_)
        assert (verified["files"], verified["damages"]) == (len(names_of(model)), [])
        shown = history.json("show", id_)["roots"][0]
        assert (shown["files"], shown["size_bytes"]) == stored(model)


def test_listings_and_contents_agree(history: History) -> None:
    """`show ID PATH`, the page and `cat` have each directory's names, their sizes and their bytes."""
    with click.Context(click.Command("web"), obj=Session(repo_option=history.cli.path)) as context:
        reading = Reading(context.obj, Catalogue(), b"k" * 32)
        for id_, model in history.some():
            folders = [path for path, facts in model.items() if not is_file(facts)]
            for folder in history.random.sample(folders, min(3, len(folders))):
                wanted = {
                    os.path.basename(path): facts
                    for path, facts in model.items()
                    if path != b"." and (os.path.dirname(path) or b".") == folder
                }
                entries = history.json("show", id_, history.absolute(folder))["entries"]
                assert {exact(one, "name") for one in entries} == wanted.keys()
                for one in entries:
                    if wanted[exact(one, "name")].kind == stat.S_IFREG:
                        assert one["size_bytes"] == wanted[exact(one, "name")].size_bytes
                page = reading.listing(id_, history.absolute(folder))
                assert {one.name for one in page.entries} == wanted.keys()
            files = [path for path, facts in model.items() if facts.kind == stat.S_IFREG]
            for path in history.random.sample(files, min(3, len(files))):
                done = history.cli.run("cat", id_, history.absolute(path))
                assert xxhash.xxh3_128(done.stdout_bytes).hexdigest() == model[path].digest
        context.obj.close()


def test_searches_agree(history: History) -> None:
    """`find` has each path that ever was with the newest snapshot that has it; `history` has its versions."""
    newest = {path: number for number, model in enumerate(history.models) for path in model if path != b"."}
    for name in _NAMES:
        pattern = b"".join(
            b"[" + one + b"]" if one in (b"*", b"?", b"[") else one for one in (bytes([at]) for at in name)
        )
        found = history.json("find", "--", pattern.replace(b"\\", b"[\\]"))["found"]
        wanted = {
            (history.absolute(path), str(history.snapshots[number].id), number < _SNAPSHOTS - 1)
            for path, number in newest.items()
            if os.path.basename(path) == name
        }
        assert {(exact(one), one["snapshot"], one["deleted"]) for one in found} == wanted, name
    paths = history.paths()
    for path in history.random.sample(paths, min(5 * _LOOKS, len(paths))):
        spans: list[tuple[Facts | None, list[int]]] = []
        for number, model in enumerate(history.models):
            facts = model.get(path)
            if facts is not None:
                facts = facts._replace(same_inode_as=b"")
            if spans and spans[-1][0] == facts:
                spans[-1][1].append(number)
            elif spans or facts is not None:
                spans.append((facts, [number]))
        versions = history.json("history", "--", history.absolute(path))["versions"]
        assert [(one["first"], one["last"], one["snapshots"], one["kind"] == "gone") for one in versions] == [
            (str(history.snapshots[at[0]].id), str(history.snapshots[at[-1]].id), len(at), facts is None)
            for facts, at in reversed(spans)
        ], path


def test_differences_agree(history: History) -> None:
    """`diff` and `changed` have what differs between two manifests."""
    for _ in range(_LOOKS):
        one, two = sorted(history.random.sample(range(_SNAPSHOTS), 2))
        (old_id, old), (new_id, new) = history.at(one), history.at(two)
        changes = history.json("diff", old_id, new_id)["changes"]
        assert {(change["kind"], exact(change)) for change in changes} == trees.expected_diff(
            history.root, old, new
        )
    changed = history.json("changed", "--since", "1d")["roots"][0]
    assert (changed["old"], changed["new"]) == (history.at(0)[0], history.at(-1)[0])
    totals: dict[bytes, Counter[str]] = {}
    old, new = (
        {path: facts for path, facts in history.models[at].items() if facts.kind == stat.S_IFREG}
        for at in (0, -1)
    )
    for path in old.keys() | new.keys():
        kind = "added" if path not in old else "deleted" if path not in new else "overwritten"
        if kind != "overwritten" or old[path].digest != new[path].digest:
            totals.setdefault(os.path.dirname(history.absolute(path)), Counter())[kind] += 1
    assert {
        exact(one): Counter(
            {kind: one[kind]["files"] for kind in ("added", "deleted", "overwritten") if one[kind]["files"]}
        )
        for one in changed["directories"]
    } == totals


def test_plans_and_restores_agree(history: History, tmp_path: Path) -> None:
    """A plan counts what the restore then does, and the tree is that of the snapshot; so is what a drill restores."""
    live = tmp_path / "root"
    for id_, model in [*history.some(), history.at(-1)]:
        words = (
            "restore",
            "-s",
            id_,
            "-p",
            history.root,
            "-d",
            str(tmp_path),
            "--overwrite",
            "--delete",
            "--yes",
        )
        before = trees.manifest(live) if live.exists() else {}
        plan = history.json(*words, "--plan")
        names = names_of(model)
        assert plan["plan"]["made"]["files"] == len(names - before.keys())
        assert plan["restored"] + plan["skipped"] == len(names)
        gone = {path for path in before if path not in model and os.path.dirname(path) in {b"", *model}}
        assert plan["plan"]["removed"]["names"] >= len(gone)
        done = history.json(*words)
        assert (done["restored"], done["skipped"]) == (plan["restored"], plan["skipped"])
        trees.assert_same(model, trees.manifest(live))
        if files := sum(facts.kind in (stat.S_IFREG, stat.S_IFLNK) for facts in model.values()):
            drill = history.json("drill", id_)["drills"][0]
            assert (drill["verdict"], drill["files_total"]) == ("good", files)


def test_mounts_agree(history: History, tmp_path: Path) -> None:
    """`mount` and `shell` show each snapshot as it was."""
    view = tmp_path / "view"
    command = [sys.executable, "-m", "ciuic", "--repo", os.fspath(history.cli.path)]
    environment = {**os.environ, "CIUIC_CONFIG": "/dev/null"}
    with subprocess.Popen(
        [*command, "mount", os.fspath(view)], env=environment, stderr=subprocess.PIPE
    ) as served:
        try:
            until("the view", lambda: os.path.ismount(view))
            for number in (0, _SNAPSHOTS // 2, _SNAPSHOTS - 1):
                snapshot = history.snapshots[number]
                place = os.fsencode(view) + b"/" + snapshot_name(snapshot.time_ns, snapshot.id) + history.root
                trees.assert_same(history.models[number], trees.manifest(place))
        finally:
            served.terminate()
            served.communicate(timeout=60)
            if os.path.ismount(view):
                mounts.detach(os.fspath(view))
    id_, model = history.at(_SNAPSHOTS // 3)
    listing = [
        *command,
        "--trust-repository",
        "shell",
        "-s",
        id_,
        "--",
        "find",
        os.fsdecode(history.root),
        "-printf",
        "%p\\0",
    ]
    done = subprocess.run(listing, env=environment, capture_output=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split(b"\0")[:-1]) == {history.absolute(path) for path in model}
