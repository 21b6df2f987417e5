"""`ciuic list`, `show`, and completion on real repositories."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from support.cli_repository import FIRST_NS, SECOND_NS, CliRepository

from ciuic.cli import doctor_checks
from ciuic.config import Config
from ciuic.history import timelines
from ciuic.repository import Repository
from ciuic.repository.promised import (
    DAMAGED,
    MAX_LOST,
    MAX_LOST_AGE_NS,
    Promise,
    promises,
    record_loss,
    record_promise,
)
from ciuic.retention import RetentionPolicy, plan_retention
from ciuic.types import FLAG_OPEN_FOR_WRITING, TAG_INCOMPLETE, TAG_NOT_HELD, Entry, not_held

ODD = b"\xff\n|x"


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    return CliRepository(tmp_path / "repo", tmp_path / "root")


def test_clock_that_was_ahead_once(repository: CliRepository, tmp_path: Path) -> None:
    """After a snapshot from a clock 400 days ahead the next one is the newest: to list, latest, prune and doctor."""
    repository.root.mkdir()
    now_ns = time.time_ns()
    for name, days in (("cs-00000a", -1), ("cs-00000f", 400), ("cs-00000b", 0)):
        repository.snapshot({b"f": name.encode()}, id_=name, time_ns=now_ns + days * 86400 * SECOND_NS)
    lines = repository.run("list", "--machine-readable").stdout.splitlines()
    assert [line.split("|")[0] for line in lines] == ["cs-00000b", "cs-00000f", "cs-00000a"]
    assert repository.run("cat", "latest", str(repository.root / "f")).stdout == "cs-00000b"
    with Repository.open(repository.path) as opened:
        newest, ahead = (
            finding.message
            for finding in doctor_checks.repository_state(opened, Config(), time.time_ns())
            if "cs-" in finding.message
        )
    assert newest.startswith("cs-00000b is the newest")
    assert ahead.startswith("cs-00000f is dated 399d23h in the future")
    config = tmp_path / "ciuic.toml"
    config.write_text('[retention]\nkeep_within = "0"\nkeep_last = 1\n')
    assert repository.run("--config", str(config), "prune").exit_code == 0
    assert repository.run("list", "--machine-readable").stdout.startswith("cs-00000b|")
    assert repository.run("list", "--machine-readable").stdout.count("\n") == 1


def test_machine_readable_is_the_contract(repository: CliRepository) -> None:
    """Lines are id|YYYY-MM-DD HH:MM:SS|size_bytes, newest first, local time, and nothing else on stdout."""
    first = repository.snapshot({b"a": b"x" * 1000})
    second = repository.snapshot({b"a": b"x" * 1000, b"b": b"y" * 24})
    result = repository.run("list", "--machine-readable")
    assert result.exit_code == 0
    lines = [line.split("|") for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == [second, first]
    assert [int(line[2]) for line in lines] == [1024, 1000]
    when = datetime.strptime(lines[0][1], "%Y-%m-%d %H:%M:%S").astimezone()
    assert when.timestamp() == FIRST_NS // SECOND_NS + 3600


def test_machine_readable_of_nothing_is_empty(repository: CliRepository) -> None:
    """A list without snapshots is empty output, with exit code 0."""
    result = repository.run("list", "--machine-readable")
    assert (result.exit_code, result.stdout) == (0, "")


def test_table_has_a_row_for_each_snapshot(repository: CliRepository) -> None:
    """The table shows id, time, sizes, files, tags and state; a held snapshot is marked."""
    repository.snapshot({b"a": b"x" * 2048}, tags=("nightly", "safety"))
    repository.run("hold", "latest", "-m", "paper")
    result = repository.run("list")
    header, row = result.stdout.splitlines()
    assert header.split() == ["ID", "TIME", "AGE", "SIZE", "NEW", "FILES", "TAGS", "STATE"]
    for text in ("cs-000001", "2.00 KiB", "nightly, safety", "held"):
        assert text in row


LOST = Promise(
    id="cs-00dead",
    time_ns=FIRST_NS,
    roots=("/r",),
    tags=("t",),
    reason="its disk was full",
    lost_ns=FIRST_NS + SECOND_NS,
)


def test_lost_snapshot_is_shown_with_the_reason(repository: CliRepository) -> None:
    """A lost snapshot is in the table, its notes and JSON with the reason, not in the lines for scripts."""
    there = repository.snapshot({b"a": b"x"})
    # A snapshot on its way is in no list.
    record_promise(repository.path, Promise(id="cs-00beef", time_ns=FIRST_NS))
    record_loss(repository.path, LOST)
    result = repository.run("list")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] in (
        [there, LOST.id],
        [LOST.id, there],
    )
    assert f"{LOST.id} was lost: its disk was full" in result.stderr
    (lost,) = json.loads(repository.run("list", "--json").stdout)["lost"]
    assert (lost["id"], lost["state"], lost["reason"]) == (LOST.id, "lost", "its disk was full")
    assert json.loads(repository.run("list", "--json", "--tag", "other").stdout)["lost"] == []
    assert repository.run("list", "--machine-readable").stdout.splitlines()[0].startswith(f"{there}|")
    assert LOST.id not in repository.run("list", "--machine-readable").stdout


def test_a_loss_that_a_later_snapshot_makes_good_is_a_row_alone(repository: CliRepository) -> None:
    """A later snapshot of the same root has the changes: no warning stands. -n counts lost snapshots as well."""
    repository.snapshot({b"a": b"x"})
    lost = msgspec.structs.replace(LOST, roots=(os.fspath(repository.root),), time_ns=FIRST_NS + SECOND_NS)
    record_loss(repository.path, lost)
    assert "was lost" in repository.run("list").stderr
    only = repository.run("list", "-n", "1")
    assert [line.split()[0] for line in only.stdout.splitlines()[1:]] == [LOST.id]
    there = repository.snapshot({b"a": b"y"})
    result = repository.run("list")
    assert (result.stdout.count("lost"), "lost" in result.stderr) == (1, False)
    only = repository.run("list", "-n", "1")
    assert [line.split()[0] for line in only.stdout.splitlines()[1:]] == [there]


def test_several_lost_snapshots_take_one_line(repository: CliRepository) -> None:
    """The warning of many lost snapshots is one line with their number and the newest reason; JSON has all."""
    for number in range(1, 6):
        lost = msgspec.structs.replace(LOST, id=f"cs-0dead{number}", time_ns=LOST.time_ns + number)
        record_promise(repository.path, lost)
    result = repository.run("list")
    assert result.stderr.count("lost") == 1
    assert "5 snapshots were lost, the newest (cs-0dead5): its disk was full" in result.stderr
    assert len(json.loads(repository.run("list", "--json").stdout)["lost"]) == 5


def test_a_lost_snapshot_is_refused_with_its_reason_and_can_be_forgotten(repository: CliRepository) -> None:
    """A lost snapshot given by its id is refused with the reason, and forget removes its mention."""
    repository.snapshot({b"a": b"x"})
    record_loss(repository.path, LOST)
    result = repository.run("verify", LOST.id)
    assert (result.exit_code, "was lost: its disk was full" in result.stderr) == (3, True)
    assert repository.run("forget", LOST.id, "-y").exit_code == 0
    assert promises(repository.path) == []


def test_a_snapshot_that_exists_is_never_shown_as_lost(repository: CliRepository) -> None:
    """A snapshot committed by a daemon killed before it noted so is not shown as lost."""
    there = repository.snapshot({b"a": b"x"})
    record_loss(repository.path, msgspec.structs.replace(LOST, id=str(there)))
    document = json.loads(repository.run("list", "--json").stdout)
    assert (document["lost"], len(document["snapshots"])) == ([], 1)


def test_notes_of_losses_are_bounded_by_number_and_age(repository: CliRepository) -> None:
    """Notes of lost snapshots are removed beyond their number and age, so a failing script fills no disk."""
    for number in range(MAX_LOST + 3):
        record_loss(repository.path, msgspec.structs.replace(LOST, id=f"cs-{number:06x}", lost_ns=number))
    assert {one.id for one in promises(repository.path)} == {
        f"cs-{number:06x}" for number in range(3, MAX_LOST + 3)
    }
    record_loss(repository.path, msgspec.structs.replace(LOST, lost_ns=2 * MAX_LOST_AGE_NS))
    assert [one.id for one in promises(repository.path)] == [LOST.id]


def test_a_damaged_promise_counts_as_lost(repository: CliRepository) -> None:
    """A damaged note of a promised snapshot is listed as lost with its id, and hides no other."""
    record_loss(repository.path, LOST)
    (repository.path / "promised" / "cs-00aaaa").write_bytes(b'{"id": "cs-0')
    (repository.path / "promised" / "other").write_bytes(b'{"id": "cs-00cccc", "time_ns": 1, "reason": "x"}')
    document = json.loads(repository.run("list", "--json").stdout)
    assert {one["id"]: one["reason"] for one in document["lost"]} == {
        "cs-00aaaa": DAMAGED,
        str(LOST.id): LOST.reason,
    }


def test_json_has_exact_values(repository: CliRepository) -> None:
    """Output of --json has RFC 3339 times with offset, sizes as integers of bytes, and every table field."""
    repository.snapshot({b"a": b"x" * 2048}, tags=("t",), message="why")
    document = json.loads(repository.run("list", "--json").stdout)
    (snapshot,) = document["snapshots"]
    assert datetime.fromisoformat(snapshot["time"]).timestamp() * SECOND_NS == FIRST_NS
    assert datetime.fromisoformat(snapshot["time"]).utcoffset() is not None
    assert (snapshot["size_bytes"], snapshot["files"], snapshot["tags"]) == (2048, 1, ["t"])
    assert (snapshot["message"], snapshot["held"], snapshot["state"]) == ("why", False, "committed")
    assert snapshot["roots"] == [{"path": str(repository.root)}]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], ["cs-000003", "cs-000002", "cs-000001"]),
        (["-n", "1"], ["cs-000003"]),
        (["-n", "0"], []),
        (["--tag", "odd"], ["cs-000003", "cs-000001"]),
        (["--tag", "none"], []),
        (["--since", "2023-06-15T14:00:00Z"], ["cs-000003", "cs-000002"]),
        (["--until", "2023-06-15T14:00:00Z"], ["cs-000002", "cs-000001"]),
        (["--root", "/elsewhere"], []),
    ],
)
def test_each_filter_leaves_what_it_describes(
    repository: CliRepository, filters: list[str], expected: list[str]
) -> None:
    """Each filter leaves exactly the snapshots that it describes."""
    for number in range(3):
        repository.snapshot({b"a": b"%d" % number}, tags=("odd",) if number % 2 == 0 else ())
    result = repository.run("list", "--machine-readable", *filters)
    assert [line.split("|")[0] for line in result.stdout.splitlines()] == expected


def test_root_filter_takes_a_relative_path(
    repository: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path given to --root is resolved against the current directory."""
    repository.snapshot({})
    monkeypatch.chdir(repository.root.parent)
    assert "cs-000001" in repository.run("list", "--machine-readable", "--root", "root").stdout


def test_unreadable_snapshot_is_not_passed_over(repository: CliRepository) -> None:
    """A snapshot file that cannot be read is named on stderr; the others are listed."""
    repository.snapshot({b"a": b"1"})
    (repository.path / "snapshots" / "cs-bad000").write_bytes(b"garbage")
    result = repository.run("list", "--machine-readable")
    assert result.exit_code == 0
    assert [line.split("|")[0] for line in result.stdout.splitlines()] == ["cs-000001"]
    assert "cs-bad000" in result.stderr


def test_a_commit_beside_the_list_is_no_damage(
    repository: CliRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that is committed between the listing and the count of its files is whole."""
    repository.snapshot({b"a": b"1"})
    monkeypatch.setattr("ciuic.repository.snapshots.SnapshotStore.list", lambda *args, **more: [])
    done = repository.run("list", "--machine-readable")
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_list_without_any_readable_snapshot_is_a_failure(repository: CliRepository) -> None:
    """Where no snapshot file can be read, the list says so with exit code 4 and is not that of a new repository."""
    (repository.path / "snapshots" / "cs-bad000").write_bytes(b"garbage")
    for options in ((), ("--machine-readable",), ("--json",)):
        result = repository.run("list", *options)
        assert (result.exit_code, "cs-bad000" in result.stderr, "yet" in result.stderr) == (4, True, False)


def test_a_listed_snapshot_whose_file_was_damaged_is_not_called_unlisted(repository: CliRepository) -> None:
    """The warning of a listed snapshot damaged since does not call it unlisted; restore gives a remedy."""
    repository.snapshot({b"a": b"1"})
    repository.snapshot({b"a": b"2"})
    (repository.path / "snapshots" / "cs-000002").write_bytes(b"garbage")
    (repository.path / "snapshots" / "cs-bad000").write_bytes(b"garbage")
    warnings = repository.run("list").stderr
    assert "cs-000002 cannot be read" in warnings
    assert "not listed" not in warnings
    refused = repository.run("restore", "-s", "latest", "-p", str(repository.root))
    assert refused.exit_code == 4
    assert "ciuic list" in refused.stderr
    assert "ciuic check" in refused.stderr


def test_no_repository_is_3(tmp_path: Path, repository: CliRepository) -> None:
    """A missing repository is reported with the path where it was expected."""
    result = repository.run("--repo", str(tmp_path / "nowhere"), "list")
    assert result.exit_code == 3
    assert str(tmp_path / "nowhere") in result.stderr


def test_list_of_a_thousand_needs_no_config(repository: CliRepository) -> None:
    """Listing a thousand snapshots loads neither configuration nor httpx nor rich."""
    repository.snapshot({b"a": b"x"})
    code = (
        "import sys\nfrom ciuic.cli import app\n"
        f"sys.argv = ['ciuic', '--repo', {str(repository.path)!r}, 'list', '--machine-readable']\n"
        "try:\n    app.run()\nfinally:\n"
        "    print([m for m in ('rich', 'httpx', 'zstandard', 'trio', 'pathspec', 'structlog', 'ciuic.config',"
        " 'bz2', 'tempfile', 'difflib')"
        " if m in sys.modules], file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("cs-000001|")
    assert result.stderr == "[]\n"


# show


def test_show_prints_the_facts(repository: CliRepository) -> None:
    """`show ID` prints time, host, sizes, tags, message and each root."""
    repository.snapshot({b"a": b"x" * 2048}, tags=("t",), message="before the change")
    text = repository.run("show", "latest").stdout
    for fact in ("cs-000001", "testhost", "2.00 KiB in 1 file,", "before the change", str(repository.root)):
        assert fact in text


@pytest.mark.parametrize("name", ["cs-000001", "000001", "cs-0000", "latest~1", "2023-06-15T13:30:00Z"])
def test_every_form_of_an_id(repository: CliRepository, name: str) -> None:
    """Full ids, prefixes, latest~N and times all resolve to the snapshot."""
    repository.snapshot({})
    repository.snapshot({}, id_="cs-abcdef")
    assert json.loads(repository.run("show", name, "--json").stdout)["id"] == "cs-000001"


@pytest.mark.parametrize("name", ["latest", "latest~2"])
def test_latest_without_snapshots_is_an_error(tmp_path: Path, name: str) -> None:
    """The message without any snapshot says so, names what was typed, and says how to get one."""
    result = CliRepository(tmp_path / "empty", tmp_path / "root").run("show", name)
    assert result.exit_code == 3
    assert f"there is no snapshot yet, so {name} names none" in result.stderr
    assert "latest~0" not in result.stderr
    assert "ciuic snapshot --wait" in result.stderr


def test_is_incomplete_is_a_boolean(repository: CliRepository) -> None:
    """is_incomplete is a boolean as in the daemon's documents; the older field is unchanged."""
    repository.snapshot({})
    repository.snapshot({}, tags=(TAG_INCOMPLETE,))
    listed = json.loads(repository.run("list", "--json").stdout)["snapshots"]
    assert [(one["is_incomplete"], one["incomplete"]) for one in listed] == [(True, True), (False, False)]
    assert json.loads(repository.run("show", "latest", "--json").stdout)["is_incomplete"] is True


def test_a_link_that_leads_to_a_root_is_followed_and_one_below_it_is_not(
    repository: CliRepository, tmp_path: Path
) -> None:
    """A path outside every root is resolved up to the root; below it the snapshot's links count."""
    root = repository.root
    root.mkdir(exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    (root / "ckpt").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(root)
    repository.snapshot({b"ckpt": {b"x": b"1"}})
    assert repository.run("show", "latest", str(tmp_path / "link" / "ckpt" / "x")).exit_code == 0
    document = json.loads(repository.run("show", "latest", str(tmp_path / "link" / "ckpt"), "--json").stdout)
    assert document["path"] == str(root / "ckpt")
    (root / "to").symlink_to(root / "ckpt")
    assert repository.run("show", "latest", str(root / "to" / "x")).exit_code == 3


def test_unknown_and_ambiguous_ids(repository: CliRepository) -> None:
    """An unknown id exits with 3, an ambiguous prefix with the code of wrong usage."""
    repository.snapshot({}, id_="cs-abc111")
    repository.snapshot({}, id_="cs-abc222")
    assert repository.run("show", "cs-ffffff").exit_code == 3
    ambiguous = repository.run("show", "abc")
    assert ambiguous.exit_code == 2
    assert "cs-abc111" in ambiguous.stderr
    assert "cs-abc222" in ambiguous.stderr


def test_show_path_lists_like_ls(repository: CliRepository) -> None:
    """A directory is listed with modes, sizes, link targets, and a mark for files open for writing."""
    link = Entry(name=b"", mode=stat.S_IFLNK | 0o777, target=b"a", mtime_ns=FIRST_NS)
    opened = Entry(name=b"", mode=stat.S_IFREG | 0o600, flags=FLAG_OPEN_FOR_WRITING, mtime_ns=FIRST_NS)
    repository.snapshot({b"d": {b"a": b"x" * 10, b"l": link, b"t": opened, b"sub": {b"deep": b"1234"}}})
    result = repository.run("show", "latest", str(repository.root / "d"))
    sub = next(line for line in result.stdout.splitlines() if line.endswith(" sub"))
    assert result.stdout.splitlines()[0].startswith("-rw-r--r--")
    assert "l -> a" in result.stdout
    assert "t  [open for writing]" in result.stdout
    assert " 4 " in sub
    assert not result.stderr


def test_files_not_held_are_named_everywhere(repository: CliRepository) -> None:
    """``list``, ``show`` and ``verify`` name files not held apart from those open; JSON has the time."""
    flags = FLAG_OPEN_FOR_WRITING | not_held(2300)
    later = Entry(name=b"", mode=stat.S_IFREG | 0o600, flags=flags, mtime_ns=FIRST_NS)
    opened = Entry(name=b"", mode=stat.S_IFREG | 0o600, flags=FLAG_OPEN_FOR_WRITING, mtime_ns=FIRST_NS)
    tree = {b"later": later, b"opened": opened}
    repository.snapshot(tree, tags=(TAG_NOT_HELD,), not_held=1, time_ns=FIRST_NS)
    (listed,) = json.loads(repository.run("list", "--json").stdout)["snapshots"]
    assert listed["not_held"] is True
    assert "not-held" in repository.run("list").stdout
    assert "not held 1 file" in repository.run("show", "latest").stdout
    shown = repository.run("show", "latest", str(repository.root))
    assert "later  [open for writing]  [not held: up to 3s later than the cut]" in shown.stdout
    assert "opened  [open for writing]\n" in shown.stdout
    assert "1 file not held" in shown.stderr
    document = json.loads(repository.run("show", "latest", str(repository.root), "--json").stdout)
    facts = {entry["name"]: (entry["open_for_writing"], entry["not_held"]) for entry in document["entries"]}
    assert facts == {"later": (True, True), "opened": (True, False)}
    until = datetime.fromisoformat(document["entries"][0]["not_held_until"])
    assert until.timestamp() == pytest.approx(FIRST_NS / 1e9 + 2.3)
    verified = repository.run("verify", "latest")
    assert verified.exit_code == 0
    assert "not held" in verified.stderr
    assert json.loads(repository.run("verify", "--all", "--json").stdout)["not_held"] == [listed["id"]]


def test_an_older_snapshot_does_not_say_what_is_held(repository: CliRepository) -> None:
    """A file open for writing may be later than the cut in a snapshot without that field."""
    opened = Entry(name=b"", mode=stat.S_IFREG | 0o600, flags=FLAG_OPEN_FOR_WRITING, mtime_ns=FIRST_NS)
    repository.snapshot({b"opened": opened}, not_held=-1)
    document = json.loads(repository.run("show", "latest", str(repository.root), "--json").stdout)
    assert [entry["not_held"] for entry in document["entries"]] == [True]
    assert json.loads(repository.run("show", "latest", "--json").stdout)["roots"][0]["not_held"] is None


def test_show_path_json_keeps_odd_names(repository: CliRepository) -> None:
    """A name that is not UTF-8 keeps its bytes in JSON, and is one escaped line in text."""
    repository.snapshot({ODD: b"x"})
    document = json.loads(repository.run("show", "latest", str(repository.root), "--json").stdout)
    (entry,) = document["entries"]
    assert base64.b64decode(entry["name_base64"]) == ODD
    text = repository.run("show", "latest", str(repository.root)).stdout
    assert text.endswith("$'\\xff\\n|x'\n")


def test_show_one_file_and_above_the_roots(repository: CliRepository) -> None:
    """A file's path shows that file; a path above the roots shows the directories that lead to them."""
    repository.snapshot({b"a": b"xyz"})
    one = json.loads(repository.run("show", "latest", str(repository.root / "a"), "--json").stdout)
    assert (one["type"], one["entries"][0]["size_bytes"]) == ("file", 3)
    above = json.loads(repository.run("show", "latest", str(repository.root.parent), "--json").stdout)
    assert [entry["name"] for entry in above["entries"]] == ["root"]


def test_show_of_no_path_is_3(repository: CliRepository) -> None:
    """A path that the snapshot does not have exits with 3, and the message says how far it was found."""
    repository.snapshot({b"d": {b"a": b"x"}})
    result = repository.run("show", "latest", str(repository.root / "d" / "b" / "c"))
    assert result.exit_code == 3
    assert "had no b" in result.stderr
    assert repository.run("show", "latest", "/elsewhere").exit_code == 3


def test_path_through_a_symbolic_link(repository: CliRepository, tmp_path: Path) -> None:
    """A root named through a symbolic link is found: roots are recorded with links resolved."""
    repository.root.mkdir()
    repository.snapshot({b"d": {b"a": b"x"}})
    (tmp_path / "link").symlink_to(repository.root)
    result = repository.run("show", "latest", str(tmp_path / "link" / "d"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.rstrip().endswith(" a")


# Completion


def complete(repository: CliRepository, *words: str) -> list[str]:
    """Return what bash would be offered for the last of the words."""
    environment = {
        **os.environ,
        "CIUIC_REPO": str(repository.path),
        "CIUIC_CONFIG": "/dev/null",
        "_CIUIC_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(["ciuic", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = subprocess.run(
        [sys.executable, "-m", "ciuic"], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stderr == ""
    return [line.partition(",")[2] for line in result.stdout.splitlines() if line]


def test_completion_of_ids(repository: CliRepository) -> None:
    """Ids complete with and without cs-, newest first, and latest is offered."""
    repository.snapshot({}, id_="cs-abc111")
    repository.snapshot({}, id_="cs-abd222")
    assert complete(repository, "show", "") == ["cs-abd222", "cs-abc111", "latest"]
    assert complete(repository, "verify", "cs-abc") == ["cs-abc111"]
    assert complete(repository, "hold", "abd") == ["cs-abd222"]
    assert complete(repository, "restore", "-s", "lat") == ["latest"]


def test_completion_heeds_the_global_options(repository: CliRepository, tmp_path: Path) -> None:
    """Completion takes ids from the --repo on the typed line, before the command and after it."""
    repository.snapshot({}, id_="cs-abc111")
    there = str(repository.path)
    repository.path = tmp_path / "nowhere"
    assert complete(repository, "--repo", there, "show", "cs-") == ["cs-abc111"]
    assert complete(repository, "show", "--repo", there, "cs-") == ["cs-abc111"]


def test_completion_of_paths_in_a_snapshot(repository: CliRepository) -> None:
    """Paths complete from the snapshot named on the line; directories end in a slash."""
    repository.snapshot({b"old": b"x"})
    repository.snapshot({b"dir": {b"file": b"x"}, b"data": b"x"})
    root = str(repository.root)
    assert complete(repository, "show", "latest", "") == [root + "/"]
    assert complete(repository, "show", "latest", root + "/d") == [root + "/data", root + "/dir/"]
    assert complete(repository, "restore", "-s", "cs-000001", "-p", root + "/") == [root + "/old"]
    assert complete(repository, "restore", "-p", root + "/dir/") == [root + "/dir/file"]


def test_completion_without_a_repository_is_silent(repository: CliRepository, tmp_path: Path) -> None:
    """Completion without a repository gives no candidates, no message and no failure."""
    repository.path = tmp_path / "nowhere"
    assert complete(repository, "show", "") == []


def test_completion_in_bash(repository: CliRepository, tmp_path: Path) -> None:
    """The code that `ciuic completion bash` prints works in bash: a name with a blank arrives quoted."""
    repository.snapshot({b"two words": b"x"})
    program = tmp_path / "ciuic"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ciuic "$@"\n')
    program.chmod(0o755)
    script = (
        'source <("$1" completion bash); COMP_WORDS=("$1" show latest "$2/tw"); COMP_CWORD=3; '
        'compopt() { :; }; _ciuic_completion "$1"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    result = subprocess.run(
        ["bash", "-c", script, "bash", str(program), str(repository.root)],
        env={**os.environ, "CIUIC_REPO": str(repository.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{repository.root}/two\\ words\n"


def test_repository_is_not_changed_by_reading(repository: CliRepository) -> None:
    """Listing and showing leave every file of the repository unchanged."""
    repository.snapshot({b"a": b"x"})

    def state() -> dict[str, tuple[int, int]]:
        return {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in repository.path.rglob("*")
            if path.is_file() and not path.name.endswith(("-shm", "-wal"))
        }

    before = state()
    repository.run("list")
    repository.run("show", "latest", str(repository.root))
    assert state() == before
    with Repository.open(repository.path) as opened:
        assert len(opened.snapshots.ids()) == 1


def test_snapshots_of_the_same_time_have_one_order(repository: CliRepository, tmp_path: Path) -> None:
    """Of snapshots of the same nanosecond list, latest, prune and history take the same one for the newest."""
    repository.root.mkdir()
    for name in ("cs-00000b", "cs-00000a", "cs-00000c"):
        repository.snapshot({b"f": name.encode()}, id_=name, time_ns=FIRST_NS)
    first = repository.run("list", "--machine-readable", "-n", "1").stdout.split("|")[0]
    with Repository.open(repository.path) as opened:
        snapshots = opened.snapshots.load_all()[0]
        assert opened.snapshots.resolve("latest") == first
        assert next(opened.snapshots.newest_first()).id == first
    (timeline,) = timelines(snapshots)
    assert timeline.snapshots[0].id == first
    newest = timeline.not_after(FIRST_NS)
    assert newest is not None
    assert newest.id == first
    # Whatever the order in which they are given.
    policy = RetentionPolicy(keep_within_seconds=0, keep_last=1)
    for some in (snapshots, snapshots[::-1]):
        plan = plan_retention(some, policy, now_ns=FIRST_NS + 1)
        assert [decision.id for decision in plan.kept] == [first]
