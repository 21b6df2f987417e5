"""Tests of drills of a repository: what was restored is what the snapshot has, to the byte and attribute, and damage is found."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoint_files import make_safetensors
from support.cli_repository import FIRST_NS, CliRepository
from support.damage import Made, make, plant
from support.second_user import NOBODY, run_as
from support.stored import flip

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance import drill
from ciuic.maintenance.drill import DrillResult, run_drill
from ciuic.protocol.last_drill import DrillVerdict, LastDrill, add_drill, read_drills, standing_drill
from ciuic.repository import Repository
from ciuic.restore import attributes
from ciuic.types import Entry


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Provide a small repository that has all structures."""
    return make(tmp_path_factory.mktemp("made"))


def drilled(repository: Path, number: int, scratch: Path, **options: Any) -> DrillResult:
    scratch.mkdir(exist_ok=True)
    with Repository.open(repository) as opened:
        ids = sorted(opened.snapshots.list(), key=lambda one: one.time_ns)
        found = run_drill(opened, opened.snapshots.load(ids[number].id), scratch, seed=1, **options)
    assert os.listdir(scratch) == []
    return found


def test_all_of_it_is_exact(made: Made, tmp_path: Path) -> None:
    """Files, links, attributes and numbers of both snapshots come back, and are counted."""
    for number in range(2):
        found = drilled(made.repository, number, tmp_path / "scratch")
        assert found.damages == ()
        assert found.files == found.files_total
        assert found.estimated_seconds == found.seconds


def test_a_flipped_bit_of_any_payload_is_found(made: Made, tmp_path: Path) -> None:
    """Of data, block maps, trees, link tables and attributes, however they are coded, in sealed and open packs."""
    dice = random.Random(3)
    kinds = [structure for structure in made.structures if structure.kind.startswith("payload: ")]
    assert {"data", "xattrs"} <= {one.kind.removeprefix("payload: ").split(",")[0] for one in kinds}
    for structure in kinds:
        copy = tmp_path / "copy"
        shutil.copytree(made.repository, copy, symlinks=True)
        assert plant(made, copy, structure, "flip", dice)
        found = [drilled(copy, number, tmp_path / "scratch").damages for number in range(2)]
        assert any(found), structure
        shutil.rmtree(copy)


def test_what_the_user_names_is_one_checkpoint(tmp_path: Path) -> None:
    """A directory or file of the user's patterns is restored whole as the newest checkpoint, whatever is in it."""
    repository = CliRepository(tmp_path / "repo", tmp_path / "root")
    new = {"mtime_ns": FIRST_NS + 10**9}
    tree = {b"best": {b"a": {b"x": (b"1", new)}, b"b.npy": b"2"}, b"odd": (b"3", new), b"old.npy": b"4"}
    repository.snapshot(tree, mode="tracked")
    for name, files in (("best/", 2), ("odd", 1)):
        pattern = f"{repository.root}/{name}"
        found = drilled(repository.path, 0, tmp_path / "scratch", sample_bytes=0, patterns=[pattern])
        assert (os.fsdecode(found.checkpoint), found.files) == (pattern.rstrip("/"), files)
        assert [one.path for one in found.verdicts] == [found.checkpoint]
        assert found.damages == ()


@pytest.mark.parametrize("what", ["mode", "times", "xattrs", "owner"])
def test_an_attribute_that_the_restore_forgets_is_found(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A restore that sets no mode, time, attribute or owner is not exact."""
    real = attributes.apply

    def forgetful(
        at: int | bytes, now: os.stat_result, entry: Any, xattrs: Any, *, times: bool = True
    ) -> list[str]:
        real(at, now, entry, xattrs, times=times)
        if what == "mode" and not stat.S_ISLNK(now.st_mode):
            os.chmod(at, 0o640)
        elif what == "times":
            os.utime(at, ns=(5, 5))
        elif what == "owner":
            os.chown(at, 4711, 4711)
        elif isinstance(at, int):
            os.setxattr(at, "user.wrong", b"1")
        return []

    monkeypatch.setattr(attributes, "apply", forgetful)
    assert drilled(made.repository, 1, tmp_path / "scratch").damages


def test_names_that_are_no_links_any_more_are_found(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two names of one inode that come back as two files."""
    from ciuic.restore.workers import Linker

    monkeypatch.setattr(Linker, "link", lambda *args: False)
    found = drilled(made.repository, 1, tmp_path / "scratch").damages
    assert [os.path.basename(one.path) for one in found] in ([b"two names"], [b"another"])
    assert "hard link" in found[0].reason


def test_only_what_lies_below_a_path(made: Made, tmp_path: Path) -> None:
    """A directory, or a single file; another path is not there."""
    root = os.fsencode(made.root)
    found = drilled(made.repository, 1, tmp_path / "scratch", within=[root + b"/many"])
    everything = drilled(made.repository, 1, tmp_path / "scratch")
    assert 0 < found.files_total < everything.files_total
    one = drilled(made.repository, 1, tmp_path / "scratch", within=[root + b"/noise"])
    assert (one.files, one.files_total) == (1, 1)
    with pytest.raises(NotFound):
        drilled(made.repository, 1, tmp_path / "scratch", within=[root + b"/nothing"])


def test_whoever_drills_is_asked_to_pause(made: Made, tmp_path: Path) -> None:
    """The throttle is called between pieces of work, and ends the drill by raising."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drilled(made.repository, 1, tmp_path / "scratch", between=stop)
    assert os.listdir(tmp_path / "scratch") == []


def test_a_full_scratch_is_no_damage(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is checked before anything is restored."""
    monkeypatch.setattr(drill, "_BATCH_BYTES", 1 << 62)
    with pytest.raises(Exception, match="free, and the drill needs"):
        drilled(made.repository, 1, tmp_path / "scratch")


@pytest.mark.parametrize("size_bytes", [1 << 20, 8 << 40])
def test_holes_take_no_space(tmp_path: Path, size_bytes: int) -> None:
    """A checkpoint that truncate(2) made longer than the disk is restored and compared as the holes that it is."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    huge = Entry(
        name=b"", mode=stat.S_IFREG | 0o600, uid=os.geteuid(), gid=os.getegid(), mtime_ns=FIRST_NS, size_bytes=size_bytes
    )  # fmt: skip
    made.snapshot({b"file": b"content", b"huge.safetensors": huge})
    found = drilled(made.path, 0, tmp_path / "scratch")
    assert (found.checkpoint, found.damages) == (os.fsencode(made.root / "huge.safetensors"), ())
    assert found.files == 2


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRepository:
    """Provide a repository with three snapshots, and a scratch directory."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    dice = random.Random(4)
    for number in range(3):
        log = (dice.randbytes(5000), {"mode": stat.S_IFREG | 0o600, "xattrs": ((b"user.a", b"1"),)})
        state = make_safetensors(dice)
        made.snapshot(
            {b"log": log, b"model-%d.safetensors" % number: state, b"torn.safetensors": state[:-100]}
        )
    return made


def drill_document(cli: CliRepository, *options: str, code: int = 0) -> Any:
    done = cli.run("drill", "--json", *options)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_the_newest_and_another(cli: CliRepository, tmp_path: Path) -> None:
    """Without an id two snapshots; with one that alone. The seed chooses the same ones again."""
    document = drill_document(cli)
    first, second = document["drills"]
    assert document["verdict"] == "good"
    assert first["snapshot"] == "cs-000003"
    assert second["snapshot"] in ("cs-000001", "cs-000002")
    assert (first["files"], first["files_total"], first["damages"]) == (3, 3, [])
    again = drill_document(cli, "--seed", str(first["seed"]))
    assert [one["snapshot"] for one in again["drills"]] == [first["snapshot"], second["snapshot"]]
    (one,) = drill_document(cli, "cs-000001")["drills"]
    assert one["snapshot"] == "cs-000001"
    assert os.listdir(tmp_path / "scratch") == []
    assert "verdict    exact, " in cli.run("drill").stdout
    assert "3 files" in cli.run("drill", "latest").stdout


def test_checkpoints_of_the_sample_are_judged(cli: CliRepository) -> None:
    """A torn one came back exactly, so that it is no damage."""
    (document,) = drill_document(cli, "latest")["drills"]
    found = {os.path.basename(one["path"]): one["verdict"] for one in document["verdicts"]}
    assert found["torn.safetensors"] == "TORN"
    assert len(found) == 2
    assert "TORN " in cli.run("drill", "latest").stdout


def test_damage_ends_with_4_and_is_noted(cli: CliRepository) -> None:
    """The newest outcome is first in the records, whoever ran it; a failed one is one, too."""
    drill_document(cli)
    assert [one.verdict for one in read_drills(cli.path)] == ["good"]
    pack = max((cli.path / "packs").glob("*.pack"), key=lambda path: path.stat().st_size)
    body = bytearray(pack.read_bytes())
    body[len(body) // 4 :: 97] = bytes(len(body[len(body) // 4 :: 97]))
    pack.write_bytes(body)
    done = cli.run("drill", "--json", "latest")
    assert done.exit_code == Damaged.exit_code
    noted = read_drills(cli.path)
    assert [one.verdict for one in noted] == ["damaged", "good"]
    assert noted[0].reason
    # Without a daemon, too.
    assert "DAMAGED" in cli.run("status").stdout
    assert json.loads(cli.run("status", "--json").stdout)["drill"]["verdict"] == "damaged"
    assert noted[0].time_ns > FIRST_NS


def test_a_part_that_was_picked_proves_nothing_of_the_rest(cli: CliRepository) -> None:
    """With -p or a smaller sample only damage is noted: alerts about late drills go on."""
    for words in (["-p", f"{cli.root}/log"], ["--sample", "1KiB"]):
        done = cli.run("drill", "latest", *words)
        assert (done.exit_code, "only a part" in done.stderr) == (0, True), done.output
    assert read_drills(cli.path) == []
    for pack in (cli.path / "packs").glob("*.pack"):
        body = bytearray(pack.read_bytes())
        body[len(body) // 4 :: 97] = bytes(len(body[len(body) // 4 :: 97]))
        pack.write_bytes(body)
    assert cli.run("drill", "latest", "-p", f"{cli.root}/model-2.safetensors").exit_code == Damaged.exit_code
    assert [one.verdict for one in read_drills(cli.path)] == ["damaged"]


def test_a_command_runs_on_what_was_restored(cli: CliRepository, tmp_path: Path) -> None:
    """All of the path, in its directory, with its name in the environment and no network; its status is part of the verdict."""
    seen = tmp_path / "seen"
    command = f"ls > {seen}; cat /proc/net/route >> {seen}; echo $CIUIC_DRILL_DIR $PWD >> {seen}"
    (document,) = drill_document(cli, "--run", command)["drills"]
    assert (document["verdict"], document["snapshot"], document["files"]) == ("good", "cs-000003", 3)
    names, where = seen.read_text().splitlines()[:3], seen.read_text().splitlines()[-1].split()
    assert names == ["log", "model-2.safetensors", "torn.safetensors"]
    assert where[0] == where[1]
    assert os.path.basename(where[0]) == "root"
    assert document["run"]["status"] == 0
    if not document["run"]["had_network"]:
        # A heading and no route.
        assert len(seen.read_text().splitlines()) == 5
    assert os.listdir(tmp_path / "scratch") == []
    assert read_drills(cli.path)[0].verdict == "good"


def test_a_command_that_fails_or_hangs_is_a_failed_drill(cli: CliRepository) -> None:
    """Exit code 1, the status, and a record; nothing of it is left after its time."""
    (document,) = drill_document(cli, "--run", "exit 3", "-p", f"{cli.root}/log", code=1)["drills"]
    assert (document["verdict"], document["run"]["status"]) == ("failed", 3)
    (document,) = drill_document(cli, "--run", "sleep 1000 & sleep 1000", "--run-timeout", "1s", code=1)[
        "drills"
    ]
    assert document["run"]["timed_out"]
    assert "did not end" in read_drills(cli.path)[0].reason
    assert "FAILED" in cli.run("drill", "--run", "false").stdout
    assert cli.run("drill", "--run-timeout", "1s").exit_code == 2
    assert cli.run("drill", "--run", "true", "-p", "/a", "-p", "/b").exit_code == 2


def test_a_command_that_succeeds_takes_its_failure_back(cli: CliRepository) -> None:
    """Also on a part, where a drill without a command proves too little; damage stays."""
    words = ("drill", "-p", f"{cli.root}/log", "--run")
    assert cli.run(*words, "false").exit_code == 1
    assert cli.run(*words, "true").exit_code == 0
    assert [one.verdict for one in read_drills(cli.path)] == ["good", "failed"]
    newest = read_drills(cli.path)[0]
    add_drill(cli.path, msgspec.structs.replace(newest, verdict="damaged", files=1))
    assert cli.run(*words, "true").exit_code == 0
    assert [one.verdict for one in read_drills(cli.path)] == ["damaged", "good", "failed"]


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.EACCES, "owner"), (errno.ENOSPC, "no room"), (errno.EIO, "")]
)
def test_the_hint_where_a_drill_cannot_be_noted(
    cli: CliRepository, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    """Another user helps against missing rights alone."""

    def refuse(place: Path, drill: LastDrill) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ciuic.protocol.last_drill.add_drill", refuse)
    done = cli.run("drill")
    assert done.exit_code == 0
    assert f"could not be noted in {cli.path}: {os.strerror(number)}" in done.stderr
    assert hint in done.stderr
    assert ("owner" in done.stderr) == (hint == "owner")


def test_a_whole_tree_is_compared_with_its_directories(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All structures come back; the mode of a directory counts, too."""
    (tmp_path / "scratch").mkdir()

    def whole(name: str) -> tuple[Any, ...]:
        (tmp_path / "scratch" / name).mkdir()
        with Repository.open(made.repository) as opened:
            newest = opened.snapshots.load(opened.snapshots.list()[0].id)
            found, place = drill.restore_whole(
                opened, newest, os.fsencode(made.root), tmp_path / "scratch" / name
            )
        assert (place / "noise").exists()
        return found.damages

    assert whole("exact") == ()
    real = attributes.apply

    def forgetful(at: Any, now: os.stat_result, *args: Any, **more: Any) -> list[str]:
        problems = real(at, now, *args, **more)
        if stat.S_ISDIR(now.st_mode):
            os.chmod(at, 0o700)
        return problems

    monkeypatch.setattr(attributes, "apply", forgetful)
    assert {os.path.basename(one.path) for one in whole("wrong")} == {b"root", b"many"}


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("damaged", [False, True])
def test_another_user_compares_what_it_may_restore(damaged: bool, request: pytest.FixtureRequest) -> None:
    """Without root there are no owners; a file that its owner may not read is compared all the same."""
    # No other user may enter the directories that tests are given.
    top = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(top))
    made = CliRepository(top / "repository", top / "root")
    dice = random.Random(6)

    def file(mode: int, **fields: Any) -> tuple[bytes, dict[str, Any]]:
        return dice.randbytes(9000), {"mode": stat.S_IFREG | mode, **fields}

    made.snapshot({b"closed": file(0), b"setuid": file(0o4755), b"of a group": file(0o660, gid=5)})
    if damaged:
        (pack,) = (path for path in (made.path / "packs").glob("*.pack") if path.stat().st_size > 20_000)
        flip(pack, 9000)
    (top / "scratch").mkdir()
    nobody = 65534
    for directory, _, names in os.walk(top):
        for name in (directory, *(os.path.join(directory, one) for one in names)):
            os.chown(name, nobody, nobody)
    script = f"""
def drilled():
    with Repository.open(Path({str(made.path)!r})) as opened:
        newest = opened.snapshots.load(opened.snapshots.list()[0].id)
        return run_drill(opened, newest, Path({str(top / "scratch")!r}), seed=1)
"""
    # As root first: the other user may not be able to read the modules that are imported on the way.
    imports = f"""
from pathlib import Path
from ciuic.maintenance.drill import run_drill
from ciuic.repository import Repository
{script}
assert drilled().files == 3
"""
    done = run_as(NOBODY, "print([one.reason for one in drilled().damages])", imports=imports)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip() != "[]") == damaged, done.stdout


def test_a_newer_file_of_unknown_format_is_no_checkpoint_to_prove(tmp_path: Path) -> None:
    """The newest checkpoint of a known format is restored whole; one of no known format only where there is no other."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    weights = make_safetensors(random.Random(1))
    late = {"mtime_ns": FIRST_NS + 10**9}
    made.snapshot({b"step-1.safetensors": weights, b"notes.bin": (b"not the weights", late)})
    (document,) = drill_document(made, "latest")["drills"]
    assert document["checkpoint"] == f"{made.root}/step-1.safetensors"
    made.snapshot({b"notes.bin": (b"not the weights", late)})
    (document,) = drill_document(made, "latest")["drills"]
    assert document["checkpoint"] == f"{made.root}/notes.bin"


def test_a_drill_of_nothing_is_none(tmp_path: Path) -> None:
    """A snapshot without a file is not chosen, and refused where it is named; nothing is noted."""
    made = CliRepository(tmp_path / "repository", tmp_path / "root")
    empty = made.snapshot({b"below": {}})
    for words in ((), (empty,)):
        result = made.run("drill", *words)
        assert (result.exit_code, "proves nothing" in result.stderr) == (3, True), result.output
    assert read_drills(made.path) == []
    full = made.snapshot({b"file": b"content", b"below": {}})
    made.snapshot({b"below": {}})
    assert [one["snapshot"] for one in drill_document(made)["drills"]] == [full]
    assert made.run("drill", full, "-p", f"{made.root}/below").exit_code == 3


@given(
    files=st.integers(1, 10**6),
    size=st.integers(0, 10**12),
    more=st.integers(0, 10**6),
    rest=st.integers(0, 10**12),
)
def test_the_estimate_is_of_files_and_of_bytes(files: int, size: int, more: int, rest: int) -> None:
    """It grows with both, is the time that was taken where nothing is left, and never that of all bytes at the rate of files without any."""

    def estimated(files_total: int, bytes_total: int) -> float:
        return DrillResult(1, b"", files, size, files_total, bytes_total, 1.0, ()).estimated_seconds

    assert estimated(files, size) == 1.0
    found = estimated(files + more, size + rest)
    assert found >= max(estimated(files + more, size), estimated(files, size + rest), 1.0)
    # However little the sample has: a file counts as 256 KiB.
    assert found <= 1 + more / files + rest / (files * (256 << 10)) + 1e-6 * found


def test_nothing_to_drill(tmp_path: Path) -> None:
    """No snapshot, no such snapshot, a remote."""
    empty = CliRepository(tmp_path / "repository", tmp_path / "root")
    assert empty.run("drill").exit_code == 3
    assert empty.run("drill", "cs-0123456789").exit_code == 3
    assert empty.run("drill", env={"CIUIC_REPO": f"file://{tmp_path}/nas"}).exit_code == 2
    assert read_drills(empty.path) == []


def test_damage_stands_until_it_is_taken_back(tmp_path: Path) -> None:
    """A good drill of another snapshot or of fewer files hides no damage; one of the same files does, and so does the snapshot's removal."""
    repository = tmp_path / "repository"
    (repository / "snapshots").mkdir(parents=True)
    for name in ("cs-00000a", "cs-00000b"):
        (repository / "snapshots" / name).touch()
    made = iter(range(1, 10))

    def drilled(verdict: DrillVerdict, snapshot: str, files: int) -> str | None:
        add_drill(
            repository,
            LastDrill(time_ns=next(made), verdict=verdict, seconds=1.0, snapshot=snapshot, files=files),
        )
        standing = standing_drill(read_drills(repository))
        return None if standing is None else standing.verdict

    assert drilled("good", "cs-00000a", 10) == "good"
    assert drilled("damaged", "cs-00000a", 10) == "damaged"
    assert drilled("good", "cs-00000b", 10) == "damaged"
    assert drilled("good", "cs-00000a", 1) == "damaged"
    assert drilled("good", "cs-00000a", 10) == "good"
    assert drilled("damaged", "cs-00000a", 10) == "damaged"
    (repository / "snapshots" / "cs-00000a").unlink()
    assert drilled("failed", "cs-00000b", 0) == "failed"
    assert standing_drill([]) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("as_root", [False, True])
def test_root_runs_the_command_as_the_owner(tmp_path: Path, as_root: bool) -> None:
    """It has the owner's ids alone, no capability, cannot read root's files, and reads and writes what was restored."""
    repository = CliRepository(tmp_path / "repo", tmp_path / "root")
    repository.snapshot({b"own": (b"data", {"uid": 4711, "gid": 4712, "mode": 0o100600})})
    # No other user may enter the directories that tests are given.
    with tempfile.TemporaryDirectory() as scratch:
        os.chmod(scratch, 0o755)
        secret = Path(scratch, "secret")
        secret.write_text("root's")
        secret.chmod(0o600)
        command = (
            f"cat {secret} own; echo >> $CIUIC_DRILL_DIR && touch new && id -u; id -G;"
            "sed -n 's/^\\(CapEff\\|CapBnd\\|NoNewPrivs\\):.//p' /proc/self/status; cat /proc/self/oom_score_adj"
        )
        done = subprocess.run(
            [sys.executable, "-m", "ciuic", "--repo", str(repository.path), "drill", "--scratch", scratch, "--run", command]
            + ["-p", f"{repository.root}/own"] + ["--as-root"] * as_root,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = done.stderr.split()
    if as_root:
        assert "root'sdata0" in done.stderr.replace("\n", "")
    else:
        at = next(number for number, word in enumerate(words) if word.startswith("data"))
        assert "Permission denied" in done.stderr
        assert words[at:][:6] == ["data4711", "4712", "0" * 16, "0" * 16, "1", "1000"]
