"""`ciuic restore` on real repositories and real directories, and what is said of its safety snapshot."""

from __future__ import annotations

import io
import json
import os
import pwd
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import msgspec
import pytest
from support.checkpoint_files import FORMATS
from support.cli_repository import FIRST_NS, NOISE, CliRepository
from support.cli_repository import repository as repository

from ciuic.cli.shared import safety_snapshot
from ciuic.cli.shared.safety_snapshot import is_over
from ciuic.cli.shared.session import Session
from ciuic.compare.restore_records import record_restore
from ciuic.errors import Damaged
from ciuic.repository import Repository
from ciuic.restore import Overwrite, journal, plan_restore
from ciuic.types import FLAG_OPEN_FOR_WRITING, Entry, not_held


def test_restore_into_a_directory(repository: CliRepository, tmp_path: Path) -> None:
    """PATH is restored as DEST/basename(PATH), with bytes and modes; DEST is made, and nothing else."""
    dest = tmp_path / "new" / "dest"
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root / "ckpt"), "-d", str(dest))
    assert result.exit_code == 0, result.stderr
    assert (dest / "ckpt" / "a").read_bytes() == NOISE
    assert (dest / "ckpt" / "b").stat().st_mode & 0o7777 == 0o644
    assert (dest / "ckpt" / "b").stat().st_mtime_ns == FIRST_NS
    assert sorted(path.name for path in dest.rglob("*")) == ["a", "b", "ckpt"]
    assert list(repository.root.iterdir()) == []


def test_restore_into_an_incomplete_lazy_restore(repository: CliRepository, tmp_path: Path) -> None:
    """A directory that a lazy restore has not completed is refused as a destination, and nothing is written to it."""
    dest = tmp_path / "dest"
    (dest / ".ciuic-state" / "lazy-restore").mkdir(parents=True)
    for place in (dest, dest / "below"):
        result = repository.run(
            "restore", "-s", "latest", "-p", str(repository.root / "log"), "-d", str(place)
        )
        assert result.exit_code == 2
        assert "was interrupted and is not complete" in result.stderr
    assert [path.name for path in dest.iterdir()] == [".ciuic-state"]


def test_restore_where_it_was(repository: CliRepository) -> None:
    """Each path is restored to its own place without -d; -p may be given several times."""
    root = repository.root
    result = repository.run(
        "restore", "-s", "latest", "-p", str(root / "ckpt" / "b"), "-p", str(root / "log")
    )
    assert result.exit_code == 0, result.stderr
    assert (root / "ckpt" / "b").read_bytes() == b"bbb"
    assert (root / "log").read_bytes() == b"line\n"
    assert not (root / "ckpt" / "a").exists()


def test_existing_files_stop_a_restore_before_any_change(repository: CliRepository) -> None:
    """Existing files make restore exit with 6 and list them all, and nothing has been changed."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "a").write_bytes(b"mine")
    (repository.root / "log").write_bytes(b"mine, too")
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root))
    assert result.exit_code == 6
    assert str(repository.root / "ckpt" / "a") in result.stderr
    assert str(repository.root / "log") in result.stderr
    assert "--overwrite" in result.stderr
    assert (repository.root / "log").read_bytes() == b"mine, too"
    assert not (repository.root / "ckpt" / "b").exists()


def test_a_conflict_in_json_is_one_document_with_code_6(repository: CliRepository) -> None:
    """A conflict with --json is one document with code 6."""
    (repository.root / "log").write_bytes(b"mine")
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root), "--json")
    assert json.loads(result.stdout)["code"] == 6


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--overwrite", b"line\n"),
        ("--overwrite=always", b"line\n"),
        ("--overwrite=if-changed", b"line\n"),
        ("--overwrite=never", b"mine"),
        ("--overwrite=if-newer", b"mine"),
    ],
)
def test_overwrite_modes_treat_newer_files_as_documented(
    repository: CliRepository, option: str, expected: bytes
) -> None:
    """Each overwrite mode treats an existing, newer file as documented."""
    (repository.root / "log").write_bytes(b"mine")
    result = repository.run("restore", "-s", "latest", option, "-p", str(repository.root / "log"))
    assert result.exit_code == 0, result.stderr
    assert (repository.root / "log").read_bytes() == expected


def test_delete_removes_only_below_the_path(repository: CliRepository) -> None:
    """--delete removes what the snapshot did not have below PATH, and nothing beside it."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "torn.tmp").write_bytes(b"x")
    (repository.root / "other").write_bytes(b"x")
    path = str(repository.root / "ckpt")
    result = repository.run("restore", "-s", "latest", "-p", path, "--overwrite", "--delete", "--json")
    assert result.exit_code == 0, result.stderr
    assert [item["path"] for item in json.loads(result.stdout)["removed"]] == [path + "/torn.tmp"]
    assert not (repository.root / "ckpt" / "torn.tmp").exists()
    assert (repository.root / "other").exists()


def test_delete_asks_before_a_newer_checkpoint_goes(tmp_path: Path) -> None:
    """A newer checkpoint that is not TORN is named, and stays without -y; with it, in a plan, or if it is TORN or no checkpoint, nothing asks."""
    whole = FORMATS["safetensors"].make(random.Random(1))
    later = {"mtime_ns": FIRST_NS + 1800 * 10**9}
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    first = made.snapshot({b"step-1.safetensors": whole}, mode="tracked")
    live = {b"step-1.safetensors": whole, b"step-3.safetensors": whole[:-1], b"cache.bin": NOISE[:999]}
    words = ("restore", "-s", str(first), "-p", str(made.root), "--overwrite", "--delete", "--no-safety")

    def restored(contents: dict[bytes, bytes], *more: str) -> tuple[int, str, set[str]]:
        made.snapshot({name: (content, later) for name, content in contents.items()}, mode="tracked")
        made.root.mkdir(exist_ok=True)
        for name, content in contents.items():
            (made.root / os.fsdecode(name)).write_bytes(content)
        result = made.run(*words, *more)
        return result.exit_code, result.stderr, {one.name for one in made.root.iterdir()}

    assert restored(live)[::2] == (0, {"step-1.safetensors"})
    live[b"step-2.safetensors"] = whole
    code, said, left = restored(live)
    assert (code, left) == (2, set(map(os.fsdecode, live)))
    assert "step-2.safetensors" in said
    assert "step-3" not in said
    assert "use -y" in said
    code, said, left = restored(live, "--plan")
    assert (code, left) == (0, set(map(os.fsdecode, live)))
    assert "step-2.safetensors" in said
    code, said, left = restored(live, "-y")
    assert (code, left) == (0, {"step-1.safetensors"})
    assert "step-2.safetensors" in said


def test_delete_keeps_excluded_files(repository: CliRepository, tmp_path: Path) -> None:
    """--delete keeps excluded files, although no snapshot has them."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "keep.cache").write_bytes(b"x")
    config = tmp_path / "c.toml"
    config.write_text(f'exclude = ["*.cache"]\n[[root]]\npath = "{repository.root}"\n')
    result = repository.run(
        "--config",
        str(config),
        *(
            "restore",
            "-s",
            "latest",
            "-p",
            str(repository.root / "ckpt"),
            "--overwrite",
            "--delete",
            "--no-safety",
        ),
    )
    assert result.exit_code == 0, result.stderr
    assert (repository.root / "ckpt" / "keep.cache").exists()


def test_dry_run_changes_nothing_and_lists_the_conflicts(repository: CliRepository) -> None:
    """--dry-run lists what would be done, and exits with the code of the real run where that would stop."""
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root), "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert str(repository.root / "ckpt" / "a") in result.stdout
    assert list(repository.root.iterdir()) == []
    (repository.root / "log").write_bytes(b"mine")
    assert repository.run("restore", "-s", "latest", "-p", str(repository.root), "--dry-run").exit_code == 6
    assert (repository.root / "log").read_bytes() == b"mine"


def test_a_dry_run_counts_an_existing_file_as_a_conflict_not_a_failure(repository: CliRepository) -> None:
    """A dry run lists an existing file once, as a conflict, and counts no failure."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "a").write_bytes(b"mine")
    (repository.root / "log").mkdir()
    arguments = ("restore", "-s", "latest", "-p", str(repository.root), "--dry-run")
    result = repository.run(*arguments)
    assert result.exit_code == 6
    assert "meanwhile" not in result.stderr
    assert "restored in part" not in result.stderr
    assert result.stderr.count(str(repository.root / "log")) == 1
    document = json.loads(repository.run(*arguments, "--json").stdout)
    existing = [str(repository.root / "ckpt" / "a"), str(repository.root / "log")]
    assert [conflict["path"] for conflict in document["conflicts"]] == existing
    assert document["failed"] == []
    assert not document["complete"]
    assert [item["path"] for item in document["items"] if item["action"] == "conflict"] == existing


def test_a_destination_that_cannot_be_made_is_named(repository: CliRepository) -> None:
    """A destination in /proc, where mkdir(2) answers ENOENT, is named, and nothing is restored in part."""
    repository.snapshot({b"a": b"1"})
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root), "-d", "/proc/ciuic")
    assert result.exit_code == 1
    assert "/proc/ciuic cannot be made" in result.stderr
    assert "descriptor" not in result.stderr


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_destination_that_is_a_file_is_named(repository: CliRepository, tmp_path: Path, below: str) -> None:
    """`-d FILE` is wrong usage: the message names the file and says what -d wants."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    result = repository.run(
        "restore", "-s", "latest", "-p", str(repository.root / "log"), "-d", str(file / below)
    )
    assert result.exit_code == 2
    assert f"the destination must be a directory, and {file} is a file" in result.stderr
    assert "name a directory with -d" in result.stderr


def test_files_that_are_not_held_are_named(repository: CliRepository, tmp_path: Path) -> None:
    """A restored file whose content may be later than the cut is named; one that was just open is not."""
    opened = Entry(name=b"", mode=stat.S_IFREG | 0o600, flags=FLAG_OPEN_FOR_WRITING, mtime_ns=FIRST_NS)
    later = msgspec.structs.replace(opened, flags=not_held(5))
    repository.snapshot({b"model.pt": later, b"log": opened}, not_held=1)
    result = repository.run(
        "restore", "-s", "latest", "-p", str(repository.root), "-d", str(tmp_path / "out")
    )
    assert result.exit_code == 0, result.stderr
    assert "1 file not held at the cut" in result.stderr
    assert "model.pt" in result.stderr
    assert "/log" not in result.stderr


def test_unknown_path_and_snapshot_are_3(repository: CliRepository) -> None:
    """An unknown path or snapshot exits with 3, and the message says what exists."""
    assert repository.run("restore", "-s", "cs-ffffff", "-p", str(repository.root)).exit_code == 3
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root / "chkpt"))
    assert result.exit_code == 3
    assert "ciuic show" in result.stderr


def protect(repository: CliRepository, config: Path) -> None:
    config.write_text(f'[control]\nsocket = "{config.parent}/s"\n[[root]]\npath = "{repository.root}"\n')


def test_safety_snapshot_makes_a_restore_undoable(repository: CliRepository, tmp_path: Path) -> None:
    """A safety snapshot is taken before a restore over a protected root, and restoring it undoes that."""
    config = tmp_path / "c.toml"
    protect(repository, config)
    (repository.root / "log").write_bytes(b"newest work")
    options = ["--config", str(config), "restore", "-p", str(repository.root / "log"), "--overwrite"]
    result = repository.run(*options, "-s", "cs-000001", "--json")
    assert result.exit_code == 0, result.stderr
    assert (repository.root / "log").read_bytes() == b"line\n"
    taken = json.loads(result.stdout)["safety_snapshot"]
    listed = json.loads(repository.run("list", "--tag", "safety", "--json").stdout)["snapshots"]
    assert [snapshot["id"] for snapshot in listed] == [taken]
    assert repository.run(*options, "-s", taken, "--no-safety").exit_code == 0
    assert (repository.root / "log").read_bytes() == b"newest work"


def test_undo_passes_over_a_restore_that_changed_nothing(repository: CliRepository, tmp_path: Path) -> None:
    """A restore run twice is taken back by one undo: the second run found everything as it was to be."""
    config = tmp_path / "c.toml"
    protect(repository, config)
    ckpt = repository.root / "ckpt"
    ckpt.mkdir()
    (ckpt / "a").write_bytes(b"newest work")
    options = [
        "--config",
        str(config),
        "restore",
        "-s",
        "cs-000001",
        "-p",
        str(ckpt),
        "--overwrite=if-changed",
    ]
    for _ in range(2):
        result = repository.run(*options)
        assert result.exit_code == 0, result.stderr
    assert "0 files" in result.stdout
    assert repository.run("--config", str(config), "undo").exit_code == 0
    assert (ckpt / "a").read_bytes() == b"newest work"
    ckpt.chmod(0o700)
    assert repository.run(*options).exit_code == 0
    assert repository.run(*options).exit_code == 0
    ckpt.chmod(0o711)
    assert "0 files" in repository.run(*options).stdout
    assert repository.run("--config", str(config), "undo").exit_code == 0
    assert ckpt.stat().st_mode & 0o777 == 0o711


def test_undo_of_a_restore_that_was_cut_short_and_went_on(
    repository: CliRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undo brings back what was before the first run, not the half-done state in which the second one began."""
    config = tmp_path / "c.toml"
    protect(repository, config)
    ckpt = repository.root / "ckpt"
    ckpt.mkdir()
    for name in ("a", "b"):
        (ckpt / name).write_bytes(b"newest work")
    options = ["--config", str(config), "restore", "-s", "cs-000001", "-p", str(ckpt), "--overwrite"]

    def half(*arguments: object, **options: object) -> None:
        mark = journal.RestoreMark("cs-000001", os.fsencode(ckpt), "0" * 16)
        (ckpt / os.fsdecode(journal.JOURNAL_NAME)).write_bytes(mark.encode())
        (ckpt / "a").write_bytes(NOISE)
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("ciuic.cli.commands.restore._execute", half)
        assert repository.run(*options).exit_code != 0
    assert (ckpt / "a").read_bytes() == NOISE
    result = repository.run(*options)
    assert result.exit_code == 0, result.stderr
    assert (ckpt / "b").read_bytes() == b"bbb"
    result = repository.run("--config", str(config), "undo")
    assert result.exit_code == 0, result.stderr
    assert [(ckpt / name).read_bytes() for name in ("a", "b")] == [b"newest work"] * 2
    assert sorted(path.name for path in ckpt.iterdir()) == ["a", "b"]


def test_restore_goes_on_without_a_safety_snapshot(
    repository: CliRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore without a possible safety snapshot says so and restores the files all the same."""
    monkeypatch.setattr(safety_snapshot, "LOCK_WAIT_SECONDS", 0.0)
    config = tmp_path / "c.toml"
    protect(repository, config)
    with Repository.open(repository.path) as opened, opened.writer(command="another capture"):
        result = repository.run(
            "--config", str(config), "restore", "-s", "latest", "-p", str(repository.root / "log")
        )
    assert result.exit_code == 0, result.stderr
    assert "no safety snapshot" in result.stderr
    assert (repository.root / "log").read_bytes() == b"line\n"


def test_no_safety_outside_protected_roots(repository: CliRepository, tmp_path: Path) -> None:
    """Safety snapshots are not taken outside protected roots, with --dry-run or with --no-safety."""
    config = tmp_path / "c.toml"
    protect(repository, config)
    path = str(repository.root / "log")
    common = ["--config", str(config), "restore", "-s", "latest", "-p", path]
    for options in (["-d", str(tmp_path / "out")], ["--dry-run"], ["--no-safety"]):
        assert repository.run(*common, *options).exit_code == 0
    assert json.loads(repository.run("list", "--tag", "safety", "--json").stdout)["snapshots"] == []


def test_interrupted_restore_can_be_run_again(repository: CliRepository, tmp_path: Path) -> None:
    """A restore interrupted at its first progress exits with 130, and run again it completes.

    No temporary files are left.
    """
    files = {b"f%04d" % number: os.urandom(3000) for number in range(400)}
    repository.snapshot({b"many": files})
    dest = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "ciuic",
        "restore",
        "-s",
        "latest",
        "-p",
        str(repository.root / "many"),
        "-d",
        str(dest),
    ]
    environment = {**os.environ, "CIUIC_REPO": str(repository.path), "CIUIC_CONFIG": "/dev/null"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not (dest.exists() and any(dest.rglob("f*"))):
            pass
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert b"Traceback" not in output
    subprocess.run([*command, "--overwrite"], env=environment, check=True, capture_output=True)
    assert {path.name.encode(): path.read_bytes() for path in (dest / "many").iterdir()} == files


def test_files_that_programs_have_open_are_named(repository: CliRepository) -> None:
    """Open and mapped files that are replaced or removed are named before and after, with their programs; others are not."""
    place = repository.root / "ckpt"
    assert repository.run("restore", "-s", "latest", "-p", str(repository.root)).exit_code == 0
    (place / "a").write_bytes(NOISE[:-1])
    (place / "extra").write_bytes(b"x" * 5000)
    program = (
        "import mmap, sys; kept = open(sys.argv[1], 'ab'), open(sys.argv[2], 'rb');"
        "file = open(sys.argv[3], 'rb'); mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); file.close();"
        "print('open', flush=True); sys.stdin.read()"
    )
    names = [str(place / name) for name in ("a", "b", "extra")]
    holder = subprocess.Popen(
        [sys.executable, "-c", program, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        restore = ("restore", "-s", "latest", "-p", str(place), "--overwrite=if-changed", "--delete")
        expected = [{"path": name, "pid": holder.pid} for name in (names[0], names[2])]
        for arguments in (("--dry-run", "--json"), ("--json",)):
            result = repository.run(*restore, *arguments)
            assert result.exit_code == 0, result.output
            document = json.loads(result.stdout)
            found = [{"path": one["path"], "pid": one["pid"]} for one in document["open_files"]]
            assert found == expected, arguments
            assert "2 open files" in result.stderr
            assert f", {holder.pid})" in result.stderr
        assert (place / "a").read_bytes() == NOISE
        # The program still has the old file, which has no name any more.
        assert json.loads(repository.run(*restore, "--json").stdout)["open_files"] == []
    finally:
        holder.communicate(timeout=30)


def test_plan_says_what_would_be_done(repository: CliRepository) -> None:
    """--plan is --dry-run: what is made, replaced and removed, the room for it, and whose work would be cut off, also below a removed tree."""
    place = repository.root / "ckpt"
    (place / "extra" / "deep").mkdir(parents=True)
    (place / "extra" / "deep" / "f").write_bytes(b"x")
    (place / "a").write_bytes(b"changed")
    program = "import sys; f = open('f', 'ab'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=place / "extra" / "deep",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        restore = ("restore", "-s", "latest", "-p", str(place), "--overwrite", "--delete")
        planned, dry = (
            json.loads(repository.run(*restore, name, "--json").stdout) for name in ("--plan", "--dry-run")
        )
        spoken = repository.run(*restore, "--plan").stderr
        holder.communicate(timeout=30)
    for document in (planned, dry):
        for room in document["plan"]["room"]:
            del room["free_bytes"]
    assert planned == dry
    assert (place / "a").read_bytes() == b"changed"
    assert planned["plan"]["made"] == {"files": 1, "bytes": len(b"bbb")}
    assert planned["plan"]["replaced"] == {"files": 1, "bytes": len(NOISE)}
    assert planned["plan"]["removed"] == {"names": 1, "files": 1, "bytes": 1, "counted": True}
    (room,) = planned["plan"]["room"]
    assert (room["needed_bytes"], room["enough"]) == (len(NOISE) + len(b"bbb"), True)
    uses = [(one["path"], one["how"], one["pid"], one["user"]) for one in planned["open_files"]]
    deep, user = str(place / "extra" / "deep"), pwd.getpwuid(os.geteuid()).pw_name
    assert uses == [(deep, "cwd", holder.pid, user), (f"{deep}/f", "writing", holder.pid, user)]
    assert f"{deep}: its working directory ({user}: " in spoken
    assert "room: " in spoken


def test_conflicts_are_named_as_everywhere(repository: CliRepository) -> None:
    """Names of conflicts can be pasted back into the shell, in a dry run and in the error."""
    made = {b"caf\xe9": b"1", b"a\nb": b"2"}
    repository.snapshot(made)
    for name in made:
        (Path(os.fsdecode(os.fsencode(repository.root) + b"/" + name))).write_bytes(b"new")
    for arguments in ((), ("--dry-run",)):
        result = repository.run("restore", "-s", "latest", "-p", str(repository.root), *arguments)
        assert result.exit_code == 6
        for name in (r"caf\xe9", r"a\nb"):
            assert f"$'{repository.root}/{name}'" in result.output


def test_status_needs_neither_snapshot_nor_path(repository: CliRepository) -> None:
    """The help of restore calls nothing required that --status does without; a restore without them is wrong usage."""
    assert "[required]" not in repository.run("restore", "--help").stdout
    for arguments in ((), ("-s", "latest"), ("-p", "/x")):
        assert repository.run("restore", *arguments).exit_code == 2


def _with_checkpoints(tmp_path: Path) -> CliRepository:
    """Make snapshots: a GOOD step 100; a torn step 200 beside it; no root `other` with a checkpoint."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    whole = FORMATS["safetensors"].make(random.Random(1))
    good = {b"step-100.safetensors": whole}
    made.snapshot({b"run": good, b"log": b"1"}, mode="tracked")
    torn = whole[: len(whole) // 2], {"mtime_ns": FIRST_NS + 2 * 10**9}
    newer = whole, {"mtime_ns": FIRST_NS + 10**9}
    made.snapshot(
        {b"run": {**good, b"step-150.safetensors": newer, b"step-200.safetensors": torn}, b"log": b"2"},
        mode="tracked",
    )
    return made


def test_restore_of_the_last_good_one(tmp_path: Path) -> None:
    """--last-good restores from the snapshot before the torn checkpoint, names both, and what it costs."""
    made = _with_checkpoints(tmp_path)
    run = str(made.root / "run")
    shown = made.run("restore", "--last-good", "-p", run, "--dry-run")
    assert shown.exit_code == 0, shown.stderr
    assert not (made.root / "run").exists()
    done = made.run("restore", "--last-good", "-p", run)
    assert done.exit_code == 0, done.stderr
    assert [path.name for path in (made.root / "run").iterdir()] == ["step-100.safetensors"]
    for result in (shown, done):
        assert "step-100.safetensors is GOOD" in result.stderr
        assert "step-200.safetensors is TORN" in result.stderr
        assert "this costs 100 steps" in result.stderr


def test_damage_of_the_newest_snapshot_refuses_no_restore_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --delete as well: newer checkpoints that cannot be looked for are not named, which is said."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    good = made.snapshot({b"run": {b"file": b"1"}})
    made.snapshot({b"run": {b"file": b"2"}})

    def refuse(*_: object, **__: object) -> None:
        raise Damaged("a tree cannot be read")

    monkeypatch.setattr("ciuic.history.checkpoints", refuse)
    done = made.run("restore", "-s", str(good), "-p", str(made.root / "run"), "--overwrite", "--delete")
    assert (done.exit_code, "not named" in done.stderr) == (0, True), done.stderr
    assert (made.root / "run/file").read_bytes() == b"1"


def test_each_torn_checkpoint_that_stays_is_told(tmp_path: Path) -> None:
    """Not the newest of a snapshot alone: with it removed by hand, the training would take the one before."""
    made = _with_checkpoints(tmp_path)
    run = made.root / "run"
    run.mkdir()
    torn = FORMATS["safetensors"].make(random.Random(1))[:50]
    names = [f"step-{step}.safetensors" for step in (100, 150, 200)]
    made.snapshot(
        {
            b"run": {
                os.fsencode(name): (torn, {"mtime_ns": FIRST_NS + (at + 3) * 10**9})
                for at, name in enumerate(names[1:])
            }
        },
        mode="tracked",
    )
    for name in names:
        (run / name).write_bytes(torn)
    done = made.run("restore", "--last-good", "-p", str(run), "--overwrite", "--dry-run")
    assert done.exit_code == 0, done.stderr
    told = done.stderr.split("that are not whole")[1]
    assert [name in told for name in names] == [False, True, True]


def test_a_torn_checkpoint_that_stays_is_told(tmp_path: Path) -> None:
    """The ordinary case: the newest one, torn, is still there, and the restore leaves it; nothing is told where it goes."""
    made = _with_checkpoints(tmp_path)
    run = made.root / "run"
    run.mkdir()
    (run / "step-200.safetensors").write_bytes(b"torn")
    for words in (["--dry-run"], []):
        done = made.run("restore", "--last-good", "-p", str(run), *words)
        assert done.exit_code == 0, done.stderr
        assert f"{run}/step-200.safetensors" in done.stderr.split("that is not whole")[1]
    document = json.loads(made.run("restore", "--last-good", "-p", str(run), "--overwrite", "--json").stdout)
    assert [one["path"] for one in document["last_good"][0]["staying"]] == [f"{run}/step-200.safetensors"]
    elsewhere = made.run("restore", "--last-good", "-p", str(run), "-d", str(tmp_path / "new"))
    assert "not whole" not in elsewhere.stderr
    deleted = made.run("restore", "--last-good", "-p", str(run), "--overwrite", "--delete")
    assert (deleted.exit_code, "not whole" in deleted.stderr) == (0, False)
    assert [path.name for path in run.iterdir()] == ["step-100.safetensors"]


def test_restore_of_the_last_good_one_of_each_root(tmp_path: Path) -> None:
    """Without -p every root with a checkpoint is restored; the document has the choice and each restore."""
    made = _with_checkpoints(tmp_path)
    found = made.run("restore", "--last-good", "--json")
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    (choice,) = document["last_good"]
    assert choice["path"] == str(made.root)
    assert choice["lost_steps"] == 100
    assert choice["newer_good"] == {
        "checkpoint": str(made.root / "run" / "step-150.safetensors"),
        "snapshot": choice["passed_over"][0]["snapshot"],
    }
    assert [one["snapshot"] for one in document["restores"]] == [choice["snapshot"]]
    assert [one["snapshot"] for one in choice["passed_over"]] != [choice["snapshot"]]
    assert (made.root / "log").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["-s", "latest", "-p", "/x"], 2, "give one of them"),
        (["-p", "/nowhere"], 3, "no snapshot has /nowhere"),
        (["--lazy"], 2, "one directory at a time"),
    ],
)
def test_last_good_that_cannot_be_meant(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    """A mistake beside --last-good is told, and nothing is restored."""
    made = _with_checkpoints(tmp_path)
    result = made.run("restore", "--last-good", *options)
    assert result.exit_code == code
    assert said in result.stderr
    assert list(made.root.iterdir()) == []


def test_nothing_is_restored_without_a_good_checkpoint(repository: CliRepository) -> None:
    """Without a GOOD checkpoint in any snapshot the command says so of each, and restores nothing."""
    result = repository.run("restore", "--last-good", "-p", str(repository.root))
    assert result.exit_code == 3
    assert "no checkpoint of a known format" in result.stderr
    assert list(repository.root.iterdir()) == []


def test_restore_of_what_matches(repository: CliRepository, tmp_path: Path) -> None:
    """--include brings names that match with the directories that lead to them, --exclude leaves names out, --all takes every root."""
    dest = tmp_path / "dest"
    words = ("restore", "-s", "latest", "--all", "-d", str(dest))
    assert repository.run(*words, "--include", "a").exit_code == 0
    assert sorted(str(path.relative_to(dest)) for path in dest.rglob("*")) == [
        "root",
        "root/ckpt",
        "root/ckpt/a",
    ]
    # What is left out is not in the way, and stays.
    (dest / "root" / "ckpt" / "b").write_text("mine")
    (dest / "root" / "ckpt" / "c").write_text("extra")
    done = repository.run(*words, "--exclude", "b", "--exclude", "c", "--overwrite", "--delete", "--json")
    assert done.exit_code == 0, done.stderr
    assert (dest / "root" / "ckpt" / "b").read_text() == "mine"
    assert (dest / "root" / "ckpt" / "c").read_text() == "extra"
    assert (dest / "root" / "log").read_bytes() == b"line\n"
    assert repository.run(*words, "--include", "nowhere").exit_code == 3
    for wrong in (("--include", ""), ("-p", str(repository.root)), ("--lazy", "--include", "a")):
        assert repository.run(*words, *wrong).exit_code == 2


def test_a_choice_is_no_other_restore_that_was_cut_short(repository: CliRepository) -> None:
    """The journal of an interrupted restore of a choice makes no file fair game for a restore of everything."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "b").write_bytes(b"bbb")
    os.utime(repository.root / "ckpt" / "b", ns=(FIRST_NS, FIRST_NS))
    with Repository.open(repository.path) as opened:
        snapshot = opened.snapshots.load(opened.snapshots.resolve("latest"))
        plan = plan_restore(opened, snapshot, [os.fsencode(repository.root)], include=("a",))
        whole = plan_restore(opened, snapshot, [os.fsencode(repository.root)], overwrite=Overwrite.ALWAYS)
    for mark, code in ((plan.targets[0].mark, 6), (whole.targets[0].mark, 0)):
        folder = os.open(repository.root, os.O_RDONLY | os.O_DIRECTORY)
        cut_short = journal.Journal.begin(folder, os.fsencode(repository.root), str(snapshot.id), mark)
        assert cut_short is not None
        cut_short.close()
        os.close(folder)
        assert repository.run("restore", "-s", "latest", "-p", str(repository.root)).exit_code == code


def test_a_gap_within_a_block_is_not_the_last_good_one(tmp_path: Path) -> None:
    """A newest archive whose data do not match their checksum is passed over, although its structure is whole and no block is a hole."""
    np = pytest.importorskip("numpy")
    repository = CliRepository(tmp_path / "repo", tmp_path / "root")
    repository.root.mkdir()
    buffer = io.BytesIO()
    np.savez(buffer, a=np.frombuffer(random.Random(1).randbytes(900_000), np.uint8))
    whole = buffer.getvalue()
    torn = whole[:300_000] + bytes(65_536) + whole[365_536:]
    repository.snapshot({b"good.npz": whole}, mode="tracked")
    repository.snapshot({b"good.npz": torn}, mode="tracked")
    result = repository.run(
        "restore", "--last-good", "-p", str(repository.root), "-d", str(tmp_path / "dest"), "--json"
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "dest" / "root" / "good.npz").read_bytes() == whole
    assert "does not match its checksum" in result.stderr


def test_a_leading_slash_is_the_top_of_what_is_restored(repository: CliRepository, tmp_path: Path) -> None:
    """As in git; a pattern that spells the path itself is absolute, and an include that takes back is refused."""
    repository.snapshot({b"b": {b"f": b"1"}, b"sub": {b"b": {b"f": b"2"}}})
    root = str(repository.root)
    for number, pattern in enumerate(("/b/", f"{root}/b/")):
        dest = tmp_path / str(number)
        words = ("restore", "-s", "latest", "-p", root, "-d", str(dest), "--exclude", pattern)
        assert repository.run(*words).exit_code == 0
        assert sorted(str(path.relative_to(dest / "root")) for path in dest.rglob("f")) == ["sub/b/f"]
    refused = repository.run("restore", "-s", "latest", "-p", root, "--include", "!b")
    assert refused.exit_code == 2
    assert "--exclude 'b'" in refused.stderr
    assert list(repository.root.iterdir()) == []


def test_delete_finds_what_is_chosen_in_every_directory(repository: CliRepository) -> None:
    """With --include, --delete removes what matches in directories that the snapshot lacks, and in those it has nothing chosen in."""
    repository.snapshot({b"a.pt": b"1", b"has": {b"note": b"n"}})
    root = repository.root
    for name in ("has", "lacks/deep"):
        (root / name).mkdir(parents=True)
        (root / name / "old.pt").write_bytes(b"x")
        (root / name / "mine").write_bytes(b"x")
    words = ("restore", "-s", "latest", "-p", str(root), "--include", "*.pt", "--overwrite", "--delete")
    planned = json.loads(repository.run(*words, "--plan", "--json").stdout)
    gone = sorted(str(root / name / "old.pt") for name in ("has", "lacks/deep"))
    assert sorted(one["path"] for one in planned["removed"]) == gone
    done = json.loads(repository.run(*words, "--json").stdout)
    assert sorted(one["path"] for one in done["removed"]) == gone
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert left == ["a.pt", "has/mine", "lacks/deep/mine"]


def test_the_undo_of_a_resumed_restore_leads_before_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that is named takes back the run that was cut short as well, as `ciuic undo` alone does."""
    record_restore(tmp_path, "cs-000001", [b"/r"], ["cs-000001"])
    record_restore(tmp_path, "cs-000002", [b"/r"], ["cs-000001", "cs-000002"], "cs-000001")
    with click.Context(click.Command("restore"), obj=Session()):
        is_over(cast("Any", SimpleNamespace(repository_dir=tmp_path)), "cs-000002", changed=True)
    assert "ciuic undo cs-000001" in capsys.readouterr().err
