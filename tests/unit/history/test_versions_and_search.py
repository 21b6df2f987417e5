"""Versions, search and sums over many snapshots, compared with what the trees were made from."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cli_repository import FIRST_NS, SECOND_NS, CliRepository, Tree

from ciuic.history import GlobMatcher, Timeline, changes_since, search, timelines, versions
from ciuic.repository import Repository

NAMES = [b"a.pt", b"b.pt", b"c.log"]
FOLDERS = [b"", b"x", b"x/y", b"z"]


def tree_of(files: dict[bytes, bytes]) -> Tree:
    """Return nested dictionaries for paths."""
    top: dict[bytes, object] = {}
    for path, data in files.items():
        *folders, name = path.split(b"/")
        at = top
        for folder in folders:
            at = at.setdefault(folder, {})  # type: ignore[assignment]
        at[name] = data
    return top  # type: ignore[return-value]


def random_history(rng: random.Random, count: int) -> list[dict[bytes, bytes]]:
    """Return the files of each snapshot, oldest first."""
    files: dict[bytes, bytes] = {}
    history = []
    for _ in range(count):
        for _ in range(rng.randrange(3)):
            folder = rng.choice(FOLDERS)
            path = (folder + b"/" if folder else b"") + rng.choice(NAMES)
            if rng.random() < 0.4:
                files.pop(path, None)
            else:
                files[path] = b"%d" % rng.randrange(4) * rng.randrange(1, 4)
        history.append(dict(files))
    return history


def stored(place: Path, history: list[dict[bytes, bytes]]) -> tuple[Repository, Timeline]:
    made = CliRepository(place / "repository", Path("/r"))
    for files in history:
        made.snapshot(tree_of(files))
    repository = Repository.open(made.path)
    (timeline,) = timelines(repository.snapshots.load_all()[0])
    return repository, timeline


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_the_read_model_agrees_with_what_was_stored(tmp_path_factory: object, seed: int) -> None:
    """Versions of every path, what was found by name, and the sums of changes are those of the files themselves."""
    rng = random.Random(seed)
    history = random_history(rng, 8)
    repository, timeline = stored(tmp_path_factory.mktemp("h"), history)  # type: ignore[attr-defined]
    with repository:
        for path in {path for files in history for path in files}:
            contents = [files.get(path) for files in history]
            expected = []
            for number, data in enumerate(contents):
                before = contents[number - 1] if number else None
                if data != before:
                    kind = "gone" if data is None else "added" if before is None else "changed"
                    expected.append((kind, f"cs-{number + 1:06x}", None if data is None else len(data)))
            found = [
                (one.kind, one.first.id, one.entry and one.entry.size_bytes)
                for one in versions(repository, timeline, b"/r/" + path)
            ]
            assert found == expected[::-1], path
        _check_search(repository, timeline, history)
        _check_changes(repository, timeline, history)


def _check_search(repository: Repository, timeline: Timeline, history: list[dict[bytes, bytes]]) -> None:
    last = {path: number for number, files in enumerate(history) for path in files}
    for pattern, folder in ((b"*.pt", b""), (b"x/**", b"x/")):
        expected = {
            b"/r/" + path: (f"cs-{number + 1:06x}", number < len(history) - 1)
            for path, number in last.items()
            if (path.endswith(b".pt") if not folder else b"/" + folder in b"/" + path)
        }
        found = {
            one.path: (str(one.snapshot.id), one.is_deleted)
            for one in search(repository, timeline, GlobMatcher(pattern))
            if one.entry.is_file
        }
        assert found == expected


def _check_changes(repository: Repository, timeline: Timeline, history: list[dict[bytes, bytes]]) -> None:
    changes = changes_since(repository, timeline, FIRST_NS + 3 * 3600 * SECOND_NS, rolled_up=True)
    assert changes is not None
    old, new = history[3], history[-1]
    top = next((one for one in changes.directories if one.path == b"/r"), None)
    sums = [
        sum(len(data) for path, data in new.items() if path not in old),
        sum(len(data) for path, data in new.items() if path in old and old[path] != data),
        sum(len(data) for path, data in old.items() if path not in new),
    ]
    assert ([total.size_bytes for total in top[1:]] if top else [0, 0, 0]) == sums
    few = changes_since(repository, timeline, FIRST_NS + 3 * 3600 * SECOND_NS, most=1)
    assert few is not None
    assert len(few.directories) <= 1
    whole = changes_since(repository, timeline, FIRST_NS + 3 * 3600 * SECOND_NS)
    assert whole is not None
    assert few.is_partial or few.directories == whole.directories
    assert not changes.is_partial


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("?ber", ["über"]),
        ("[öü]ber", ["über"]),
        ("[!a]ber", ["über"]),
        (b"caf?", [b"caf\xe9"]),
        ("*/weights", ["runs/weights", "runs/a/weights", "runs/a/b/weights"]),
        ("runs/*/weights", ["runs/a/weights"]),
        ("/r/runs/*/weights", ["runs/a/weights"]),
        ("/runs/*/weights", []),
        ("runs/**/weights", ["runs/weights", "runs/a/weights", "runs/a/b/weights"]),
        ("/r/**/b/**/weights", ["runs/a/b/weights"]),
        ("a/**", ["runs/a/b", "runs/a/weights", "runs/a/b/weights"]),
        ("uni/", ["uni"]),
        ("/r/uni///", ["uni"]),
        ("r*/", ["runs"]),
        ("weights/", []),
        ("**/u*", ["uni"]),
        ("weigh.s", []),
    ],
)
def test_patterns_are_those_of_gitignore(
    tmp_path: Path, pattern: str | bytes, expected: list[str | bytes]
) -> None:
    """`?` is one character, `*` stays within a name, `**` crosses directories, and a slash at the end finds directories."""
    files = dict.fromkeys((b"runs/weights", b"runs/a/weights", b"runs/a/b/weights", b"uni/x"), b"1")
    repository, timeline = stored(
        tmp_path, [{**files, "über".encode(): b"1", b"caf\xe9": b"1"}, {**files, "über".encode(): b"2"}]
    )
    with repository:
        found = {one.path for one in search(repository, timeline, GlobMatcher(os.fsencode(pattern)))}
    assert found == {b"/r/" + os.fsencode(name) for name in expected}


def test_equal_directories_are_read_once(tmp_path: Path) -> None:
    """A search over snapshots that differ in one directory reads the nodes of the others once."""
    rng = random.Random(1)
    history = [
        {b"big/%d" % at: b"x" for at in range(300)} | {b"small/a": rng.randbytes(9)} for _ in range(10)
    ]
    repository, timeline = stored(tmp_path, history)
    read = []
    get = repository.chunks.get
    repository.chunks.get = lambda chunk: read.append(chunk) or get(chunk)  # type: ignore[method-assign,func-returns-value]
    found = list(search(repository, timeline, GlobMatcher(b"*")))
    assert len(found) == 303
    assert len(read) == len(set(read))


def test_two_hosts_have_two_histories(tmp_path: Path) -> None:
    """The same path on two hosts is two timelines, each with its own snapshots."""
    repository, timeline = stored(tmp_path, [{b"a": b"1"}, {b"a": b"2"}])
    import msgspec

    loaded = list(timeline.snapshots)
    other = msgspec.structs.replace(loaded[0], host="elsewhere")
    found = timelines([other, loaded[1]])
    assert [(one.host, len(one.snapshots)) for one in found] == [("elsewhere", 1), ("testhost", 1)]
    repository.close()
