"""`ciuic history`, `find`, `changed`, `cat` and `checkpoints` on real repositories."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.checkpoint_files import FORMATS
from support.cli_repository import CliRepository
from support.terminal import on_terminal

from ciuic.history import checkpoints, timelines
from ciuic.repository import Repository
from ciuic.verdicts.records import DatedCheckpoint, newest_of

WEIGHTS = FORMATS["safetensors"].make(random.Random(1))


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    """Make three snapshots of root: a grows, b is deleted, and ckpt has a whole and a torn file."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    both = {b"good.safetensors": WEIGHTS, b"torn.safetensors": WEIGHTS[:-5]}
    made.snapshot({b"a": b"one", b"b": b"deleted later", b"ckpt": both})
    made.snapshot({b"a": b"one", b"ckpt": both, b"new": {b"c": b"added"}})
    made.snapshot({b"a": b"three", b"ckpt": both, b"new": {b"c": b"added"}})
    return made


def document(repository: CliRepository, *arguments: str) -> Any:
    result = repository.run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_history_of_a_file(repository: CliRepository) -> None:
    """Each version is a line with the oldest snapshot that has it, newest first; -n limits them."""
    path = str(repository.root / "a")
    lines = repository.run("history", path).stdout.splitlines()
    assert [line.split()[2] for line in lines[1:]] == ["cs-000003", "cs-000001"]
    found = document(repository, "history", path)["versions"]
    assert [(one["kind"], one["first"], one["last"], one["snapshots"]) for one in found] == [
        ("changed", "cs-000003", "cs-000003", 1),
        ("added", "cs-000001", "cs-000002", 2),
    ]
    assert found[0]["details"][0] == "content"
    assert len(document(repository, "history", path, "-n", "1")["versions"]) == 1


def test_history_says_that_a_file_is_gone(repository: CliRepository) -> None:
    """A deleted file has a line GONE; a path that never was is exit code 3."""
    assert "GONE" in repository.run("history", str(repository.root / "b")).stdout
    gone = document(repository, "history", str(repository.root), "--deleted")["found"]
    assert [(one["path"], one["snapshot"]) for one in gone] == [(str(repository.root / "b"), "cs-000001")]
    assert repository.run("history", str(repository.root / "never")).exit_code == 3
    assert repository.run("history", "/elsewhere").exit_code == 3


def test_find_by_name(repository: CliRepository) -> None:
    """A pattern finds files and directories of all snapshots; --deleted and --since select among them."""
    assert [one["path"] for one in document(repository, "find", "[abc]")["found"]] == [
        str(repository.root / "a"),
        str(repository.root / "new" / "c"),
        str(repository.root / "b"),
    ]
    (gone,) = document(repository, "find", "?", "--deleted")["found"]
    assert (gone["path"], gone["deleted"], gone["snapshot"]) == (
        str(repository.root / "b"),
        True,
        "cs-000001",
    )
    assert document(repository, "find", "b", "--since", "2023-06-15T13:30:00Z")["found"] == []
    assert [one["path"] for one in document(repository, "find", "new/*")["found"]] == [
        str(repository.root / "new" / "c")
    ]
    assert [one["path"] for one in document(repository, "find", "ckpt/")["found"]] == [
        str(repository.root / "ckpt")
    ]
    for nothing in ("", "/", "//"):
        result = repository.run("find", nothing)
        assert (result.exit_code, "names nothing" in result.stderr) == (2, True)


def test_changed_by_directory(repository: CliRepository) -> None:
    """Bytes that were added, overwritten and deleted are summed by directory, with --tree up to the root."""
    (root,) = document(repository, "changed", "--since", "2023-06-15T13:00:00Z", "--tree")["roots"]
    sums = {one["path"]: (one["added"], one["overwritten"], one["deleted"]) for one in root["directories"]}
    assert sums[str(repository.root)] == (
        {"files": 1, "size_bytes": 5},
        {"files": 1, "size_bytes": 5},
        {"files": 1, "size_bytes": 13},
    )
    assert sums[str(repository.root / "new")][0] == {"files": 1, "size_bytes": 5}
    plain = repository.run("changed", "--since", "2023-06-15T13:00:00Z").stdout
    assert "13 B in 1 file" in plain


def test_cat_prints_the_bytes(repository: CliRepository) -> None:
    """The content of a file comes out as it was, byte by byte; a directory is refused."""
    result = repository.run("cat", "cs-000001", str(repository.root / "ckpt" / "good.safetensors"))
    assert result.stdout_bytes == WEIGHTS
    assert repository.run("cat", "latest~2", str(repository.root / "a")).stdout_bytes == b"one"
    assert repository.run("cat", "latest", str(repository.root)).exit_code == 2
    assert repository.run("cat", "latest", str(repository.root / "b")).exit_code == 3


def test_a_pattern_names_what_is_one_checkpoint(tmp_path: Path) -> None:
    """A directory or file that matches --pattern is one checkpoint, UNKNOWN without a known format; all else stays as it was."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    whole = FORMATS["safetensors"].make(random.Random(1))
    parts = {b"a.safetensors": whole, b"below": {b"b.safetensors": whole}}
    made.snapshot(
        {
            b"best": parts,
            b"torn": parts | {b"c.safetensors": whole[:-1]},
            b"raw": {b"x": b"1"},
            b"weights": whole,
        },
        mode="tracked",
    )
    words = (
        "checkpoints",
        "--pattern",
        "/best",
        "--pattern",
        "torn/",
        "--pattern",
        "raw",
        "--pattern",
        "weights",
    )
    found = {Path(one["path"]).name: one["verdict"] for one in document(made, *words)["checkpoints"]}
    assert found == {"best": "GOOD", "torn": "TORN", "raw": "UNKNOWN", "weights": "GOOD"}
    assert len(document(made, "checkpoints")["checkpoints"]) == 5
    assert made.run("checkpoints", "--pattern", "").exit_code == 2


def test_checkpoints_have_verdicts(repository: CliRepository) -> None:
    """A torn checkpoint is TORN; a whole one in a snapshot that knows nothing of writers is UNKNOWN, and says why."""
    found = {Path(one["path"]).name: one for one in document(repository, "checkpoints")["checkpoints"]}
    assert found["torn.safetensors"]["verdict"] == "TORN"
    assert found["good.safetensors"]["verdict"] == "UNKNOWN"
    assert "without an overlay" in found["good.safetensors"]["reason"]
    assert "TORN" in repository.run("checkpoints", "cs-000001").stdout
    assert document(repository, "checkpoints", "--root", str(repository.root), "-n", "1")["checkpoints"]


def test_newest_checkpoint_is_the_same_one_everywhere(repository: CliRepository) -> None:
    """Of checkpoints of the same time `checkpoints -n 1` shows the one that `list` and `restore --last-good` look at first."""
    shown = document(repository, "checkpoints")["checkpoints"]
    assert len({one["mtime_ns"] for one in shown}) == 1
    with Repository.open(repository.path) as opened:
        (timeline,) = timelines(opened.snapshots.load_all()[0])
        found = list(checkpoints(opened, timeline))
        newest = newest_of(DatedCheckpoint(one.checkpoint, one.mtime_ns) for one in found)
    assert newest is not None
    assert shown[0]["path"] == os.fsdecode(newest.checkpoint.path)
    refused = repository.run("restore", "--last-good", "-p", str(repository.root / "ckpt"))
    assert f"{shown[0]['path']} is {shown[0]['verdict']}" in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [["history", "ROOT/a"], ["find", "*"], ["changed", "--since", "2023-06-15", "--tree"], ["checkpoints"]],
)
def test_sixty_columns_are_enough(repository: CliRepository, arguments: list[str]) -> None:
    """On a terminal of 60 columns no line is wider, but for a path that is longer itself."""
    words = [word.replace("ROOT", str(repository.root)) for word in arguments]
    printed = on_terminal(repository.path, *words, COLUMNS="60", NO_COLOR="1").decode()
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in printed.splitlines()]
    assert not [line for line in lines if len(line) > 60 and str(repository.root) not in line]


@pytest.mark.parametrize("words", [["cat", "cs-000001"], ["history"]])
def test_the_shell_completes_paths_inside_snapshots(repository: CliRepository, words: list[str]) -> None:
    """`ciuic cat ID` and `ciuic history` complete the paths of the snapshot that is named, or of the newest."""
    typed = ["ciuic", *words, f"{repository.root}/ckpt/t"]
    variables = {
        "_CIUIC_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(typed),
        "COMP_CWORD": str(len(typed) - 1),
    }
    result = repository.run(env=variables, prog_name="ciuic", complete_var="_CIUIC_COMPLETE")
    assert f"plain,{repository.root}/ckpt/torn.safetensors" in result.stdout


STATE = b'{"version":1,"plain":[],"values":{},"objects":{"model":{}}}'
FACTS = b'{"version":1,"objects":["model"]}'
INDEX = b'{"weight_map":{"w":"w.safetensors"}}'
OBJECT = {b"model.safetensors.index.json": INDEX, b"w.safetensors": WEIGHTS}


@pytest.mark.parametrize(
    ("tree", "state", "reason"),
    [
        ({b"snapshot.json": FACTS, b"state.json": STATE, b"model": OBJECT}, "GOOD", "1 file"),
        ({b"state.json": STATE, b"model": OBJECT}, "TORN", "snapshot.json is missing"),
        ({b"snapshot.json": FACTS, b"state.json": b'{"version":1', b"model": OBJECT}, "TORN", "not the JSON"),
        (
            {b"snapshot.json": FACTS, b"state.json": STATE, b"model": {**OBJECT, b"w.safetensors": b"123"}},
            "TORN",
            "w.safetensors",
        ),
        (
            {b"snapshot.json": FACTS, b"state.json": STATE, b"model": {b"m.safetensors.index.json": INDEX}},
            "TORN",
            "w.safetensors is missing",
        ),
        (
            {b"snapshot.json": FACTS, b"state.json": b'{"version":1,"objects":{}}', b"model": OBJECT},
            "TORN",
            "lacks the object",
        ),
        (
            {b"snapshot.json": FACTS, b"state.json": b'{"version":9,"objects":{}}', b"model": OBJECT},
            "UNKNOWN",
            "later version",
        ),
    ],
)
def test_a_state_of_a_training_is_one_checkpoint(
    tmp_path: Path, tree: dict[bytes, Any], state: str, reason: str
) -> None:
    """A state is judged by its documents, indexes and files; in a root of files the same is judged file by file."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot(tree, mode="full", tags=("training",))
    (found,) = document(made, "checkpoints")["checkpoints"]
    assert (found["path"], found["verdict"], found["format"]) == (str(made.root), state, "training")
    assert reason in found["reason"]
    made.snapshot(tree)
    assert all(one["format"] != "training" for one in document(made, "checkpoints")["checkpoints"])


def test_safety_snapshots_are_marked(repository: CliRepository) -> None:
    """What only a safety snapshot has, which `list` hides, is marked in `find` and `history`."""
    repository.snapshot(
        {b"a": b"x", b"s": b"y"}, tags=("safety",), message="before the restore from cs-000001"
    )
    (found,) = document(repository, "find", "s")["found"]
    assert (found["safety"], found["snapshot"]) == (True, "cs-000004")
    assert "safety" in repository.run("find", "s").stdout
    assert document(repository, "find", "ckpt")["found"][0]["safety"] is False
    text = repository.run("history", str(repository.root / "s")).stdout
    assert "cs-000004 (safety)" in text
    (version,) = document(repository, "history", str(repository.root / "s"))["versions"]
    assert (version["first_safety"], version["last_safety"]) == (True, True)


def test_changed_since_the_future_is_wrong_usage(repository: CliRepository) -> None:
    """A time that has not come is refused: nothing can have changed since."""
    result = repository.run("changed", "--since", "2999-01-01")
    assert (result.exit_code, "lies in the future" in result.output + str(result.exception)) == (2, True)
