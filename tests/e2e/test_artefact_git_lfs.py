"""``ciuic export --as git-lfs``: real git and git-lfs push, clone and read what was exported, and nothing else happens."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.dying_os import DATA_CALLS, NAME_CALLS, DyingOs, Killed, Steps
from support.restoring import take

from ciuic.artefacts import folder, git, git_lfs
from ciuic.artefacts.git_lfs import LFS_BYTES, Committed, export_git_lfs
from ciuic.artefacts.snapshot_files import files_of
from ciuic.cli.app import cli
from ciuic.errors import CiuicError, DestinationExists, NotFound, NotPermitted, UsageError
from ciuic.repository import Repository
from ciuic.system import disk

_STRANGER = 4321
_ODD_NAMES = (
    b"plain.bin", b"two words", b" led by a blank", b"-rf", b"--help", b"line\nend", b'quo"te', b"it's", b"back\\slash",
    b"star*", b"what?", b"[ab]", b"!not", b"#no comment", b"not utf-8 \xff\xfe", "größe".encode(), b"tab\there", b"$(touch x)",
    b"a=b", b"trailing ", b"~", b"{a,b}", b":(top)x", b"n" * 255, b"deep/-x/\n/y*", b"%d%s",
)  # fmt: skip


class Place:
    """A root, its repository and a destination."""

    def __init__(self, top: Path) -> None:
        self.root = top / "root"
        self.root.mkdir()
        self.destination = top / "destination"
        self.repository = Repository.create(top / "repository", block_size=65536)
        self.rng = random.Random(7)

    def write(self, name: bytes, data: bytes, mode: int = 0o644) -> None:
        path = Path(os.fsdecode(os.fsencode(self.root) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)

    def large(self) -> bytes:
        return self.rng.randbytes(LFS_BYTES + 3)

    def export(self, *, overwrite: bool = False) -> Committed:
        """Take a snapshot, and export it."""
        snapshot = take(self.repository, self.root)
        with self.repository.reopen() as repository:
            path = os.fsencode(self.root)
            found = files_of(repository, snapshot, path)
            return export_git_lfs(snapshot, repository.id, path, found, self.destination, overwrite=overwrite)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.repository.close()


def run(*words: str | Path, cwd: Path) -> bytes:
    environment = {
        **os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0", "HOME": str(cwd), "GIT_CONFIG_GLOBAL": "/dev/null",
    }  # fmt: skip
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def clone(source: Path, to: Path) -> Path:
    """Clone with git-lfs set up in the clone alone, and fetch its objects."""
    lfs = [
        word
        for key in ("clean -- %f", "smudge -- %f")
        for word in ("-c", f"filter.lfs.{key.split()[0]}=git-lfs {key}")
    ]
    run("git", *lfs, "-c", "filter.lfs.process=git-lfs filter-process", "-c", "filter.lfs.required=true", "clone", "-q",
        f"file://{source}", to, cwd=to.parent)  # fmt: skip
    return to


def content(top: Path) -> dict[bytes, tuple[bytes, bool]]:
    """Return content and execute permission of each file and link that the export has made, without its own."""
    found: dict[bytes, tuple[bytes, bool]] = {}
    start = os.fsencode(top)
    for above, directories, names in os.walk(start):
        if above == start and b".git" in directories:
            directories.remove(b".git")
        for name in [*names, *(one for one in directories if os.path.islink(above + b"/" + one))]:
            path = above + b"/" + name
            st = os.lstat(path)
            if stat.S_ISLNK(st.st_mode):
                found[os.path.relpath(path, start)] = b"-> " + os.readlink(path), False
            else:
                found[os.path.relpath(path, start)] = (
                    Path(os.fsdecode(path)).read_bytes(),
                    bool(st.st_mode & 0o100),
                )
    for own in (b".gitattributes", b".ciuic-export.json"):
        found.pop(own, None)
    return found


def test_a_push_and_a_clone_by_git_lfs_have_every_byte(place: Place, tmp_path: Path) -> None:
    """What was exported, pushed over file:// and cloned with git-lfs has names, bytes and execute permissions of the snapshot."""
    for name in _ODD_NAMES:
        place.write(b"large/" + name, place.large(), 0o755 if name == b"plain.bin" else 0o644)
        place.write(b"small/" + name, name + b"\r\n", 0o700 if name == b"-rf" else 0o600)
    place.write(b"empty", b"")
    place.write(b"holes", bytes(3 * LFS_BYTES))
    place.write(
        b"pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n"
    )
    place.write(b"crlf.txt", b"one\r\ntwo\n$Id$\r\n")
    os.symlink(b"/etc/passwd", os.fsencode(place.root) + b"/link")
    os.symlink(b"large", os.fsencode(place.root) + b"/link to directory")
    done = place.export()
    assert content(place.destination) == content(place.root)
    # git-lfs takes a pointer for its own, so that one which is content differs for it.
    assert run("git", "status", "--porcelain", cwd=place.destination) == b" M pointer\n"
    assert run("git", "fsck", "--strict", cwd=place.destination) == b""
    listed = run("git", "lfs", "ls-files", "-l", cwd=place.destination)
    # The holes and the pointer are objects as well.
    assert (done.lfs_files, len(listed.splitlines()) >= done.lfs_files) == (len(_ODD_NAMES) + 2, True)
    trailers = run(
        "git", "log", "-1", "--format=%(trailers:key=Ciuic-Snapshot,valueonly)", cwd=place.destination
    )
    assert trailers.decode().strip().startswith("cs-")
    bare = tmp_path / "bare.git"
    run("git", "init", "-q", "--bare", bare, cwd=tmp_path)
    run("git", "push", "-q", f"file://{bare}", "main", cwd=place.destination)
    run("git", "symbolic-ref", "HEAD", "refs/heads/main", cwd=bare)
    assert content(clone(bare, tmp_path / "clone")) == content(place.root)
    (tmp_path / "plain").mkdir()
    run(
        "git",
        "-c",
        "filter.lfs.required=false",
        "clone",
        "-q",
        "-c",
        "filter.lfs.smudge=cat",
        f"file://{bare}",
        "plain",
        cwd=tmp_path,
    )
    plain = content(tmp_path / "plain")
    pointers = {name for name, (data, _) in plain.items() if data.startswith(b"version https://git-lfs")}
    assert pointers == {b"large/" + name for name in _ODD_NAMES} | {b"holes", b"pointer"}


def test_a_later_export_writes_what_has_changed_alone(place: Place, tmp_path: Path) -> None:
    """A later export reads, hashes and writes what has changed; what is gone from the snapshot goes, what it does not know stays."""
    for number in range(3):
        place.write(b"large%d" % number, place.large())
        place.write(b"below/small%d" % number, b"%d" % number)
    place.write(b"gone/deep/file", b"x")
    first = place.export()
    assert first.is_new
    (place.destination / "mine").write_text("of the user")
    before = {name: os.lstat(place.destination / os.fsdecode(name)) for name in content(place.destination)}
    changed = place.large()
    place.write(b"large1", changed)
    place.write(b"below/small1", b"other")
    os.rename(place.root / "large2", place.root / "moved")
    os.unlink(place.root / "gone/deep/file")
    second = place.export()
    assert (second.updated.written_bytes, second.updated.removed) == (len(changed) + 5, 2)
    for name in (b"large0", b"below/small0", b"below/small2", b"mine"):
        after = os.lstat(place.destination / os.fsdecode(name))
        assert (after.st_ino, after.st_mtime_ns) == (before[name].st_ino, before[name].st_mtime_ns)
    assert not (place.destination / "gone").exists()
    assert content(place.destination) == {**content(place.root), b"mine": (b"of the user", False)}
    assert run("git", "status", "--porcelain", cwd=place.destination) == b"?? mine\n"
    assert run("git", "rev-list", "--count", "HEAD", cwd=place.destination) == b"2\n"
    assert run("git", "rev-list", "--count", "--all", cwd=place.destination) == b"2\n"


def test_the_same_snapshot_is_committed_once(place: Place) -> None:
    """An export of the snapshot that is there makes no commit, and mends what was changed in the working tree."""
    place.write(b"large", place.large())
    place.write(b"small", b"x")
    place.export()
    (place.destination / "small").write_text("spoiled")
    os.unlink(place.destination / "large")
    runner = CliRunner()
    words = [
        "--repo",
        str(place.repository.path),
        "export",
        "latest",
        "-p",
        str(place.root),
        "--as",
        "git-lfs",
        str(place.destination),
        "--json",
    ]
    result = runner.invoke(cli, words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["is_new"], document["written_bytes"], document["lfs_files"]) == (False, 0, 1)
    assert content(place.destination) == content(place.root)


@pytest.mark.parametrize("seed", range(8))
def test_an_interrupted_export_is_repeated(place: Place, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A process that dies at any moment leaves the branch as it was, and the next export does everything."""
    rng = random.Random(seed)
    for number in range(2):
        place.write(b"large%d" % number, place.large())
        place.write(b"small%d" % number, b"%d" % number)
    place.export()
    head = run("git", "rev-parse", "HEAD", cwd=place.destination)
    place.write(b"large0", place.large())
    place.write(b"new/large", place.large())
    place.write(b"small0", b"changed")
    os.unlink(place.root / "small1")
    call = git.Git._run
    # Calls on files in even runs, commands of git in odd ones.
    steps = Steps(rng.randrange(1, 70) if seed % 2 == 0 else rng.randrange(1, 20))
    with monkeypatch.context() as patched:
        if seed % 2 == 0:
            dying = DyingOs(steps, NAME_CALLS | DATA_CALLS)
            for module in (folder, disk):
                patched.setattr(module, "os", dying)
        else:
            patched.setattr(git.Git, "_run", lambda self, *words: steps(lambda: call(self, *words)))
        with pytest.raises(Killed):
            place.export()
    assert run("git", "rev-parse", "HEAD", cwd=place.destination) == head or not steps.left
    place.export()
    assert content(place.destination) == content(place.root)
    assert run("git", "status", "--porcelain", cwd=place.destination) == b""
    assert run("git", "for-each-ref", "--format=%(refname)", cwd=place.destination) == b"refs/heads/main\n"
    assert not (place.destination / ".git/ciuic-export.tmp").exists()
    run("git", "fsck", "--strict", cwd=place.destination)
    run("git", "lfs", "fsck", cwd=place.destination)


def test_the_lock_of_a_git_that_was_killed_is_removed(place: Place) -> None:
    """Locks that exports alone take hinder none; one that any git may hold is named, and nothing is committed."""
    place.write(b"file", b"x")
    place.export()
    stale = place.destination / ".git/refs/ciuic/export.lock"
    stale.parent.mkdir(exist_ok=True)
    stale.touch()
    place.write(b"file", b"y")
    assert place.export().is_new
    (place.destination / ".git/index.lock").touch()
    place.write(b"file", b"z")
    head = run("git", "rev-parse", "HEAD", cwd=place.destination)
    with pytest.raises(CiuicError, match=r"index\.lock"):
        place.export()
    assert run("git", "rev-parse", "HEAD", cwd=place.destination) == head
    (place.destination / ".git/index.lock").unlink()
    assert place.export().is_new
    assert content(place.destination) == content(place.root)


def test_nothing_that_the_working_tree_configures_runs(place: Place, tmp_path: Path) -> None:
    """No hook, filter, monitor or transport of the destination runs, whatever its configuration and attributes say."""
    place.write(b"large", place.large())
    place.write(b"small", b"x")
    place.export()
    mark = tmp_path / "mark"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    program.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    names = [
        "pre-commit",
        "post-commit",
        "reference-transaction",
        "post-checkout",
        "post-index-change",
        "pre-auto-gc",
        "update",
        "commit-msg",
    ]
    for where in (hooks, place.destination / ".git/hooks"):
        for name in names:
            (where / name).unlink(missing_ok=True)
            (where / name).symlink_to(program)
    for key in ("core.fsmonitor", "filter.lfs.clean", "filter.lfs.process", "filter.evil.clean", "filter.evil.smudge", "core.sshCommand",
                "core.pager", "core.editor", "gpg.program", "core.alternateRefsCommand", "uploadpack.packObjectsHook"):  # fmt: skip
        run("git", "config", "--local", key, str(program), cwd=place.destination)
    run("git", "config", "--local", "core.hooksPath", str(hooks), cwd=place.destination)
    run("git", "config", "--local", "commit.gpgSign", "true", cwd=place.destination)
    (place.destination / ".git/info").mkdir(exist_ok=True)
    (place.destination / ".git/info/attributes").write_text("* filter=evil\n")
    place.write(b"large", place.large())
    place.write(b"sub/.gitattributes", b"* filter=evil\n")
    place.write(b".lfsconfig", b"[lfs]\nurl = https://elsewhere.example\n")
    place.write(b"x\\.git/config", b"")
    done = place.export()
    assert not mark.exists()
    assert {one.name for one in done.left_out} == {b"sub/.gitattributes", b".lfsconfig", b"x\\.git/config"}
    assert not (place.destination / ".lfsconfig").exists()


def test_links_in_the_destination_are_not_followed(place: Place, tmp_path: Path) -> None:
    """A link in the destination is replaced or refused, and what it leads to stays as it is."""
    place.write(b"below/file", b"of the snapshot")
    place.write(b"file", b"of the snapshot")
    place.export()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("untouched")
    os.unlink(place.destination / "file")
    (place.destination / "file").symlink_to(elsewhere / "file")
    place.export()
    assert (place.destination / "file").read_text() == "of the snapshot"
    os.unlink(place.destination / "below/file")
    os.rmdir(place.destination / "below")
    (place.destination / "below").symlink_to(elsewhere)
    with pytest.raises(DestinationExists, match="below"):
        place.export()
    assert (elsewhere / "file").read_text() == "untouched"
    os.rename(place.destination / ".git", tmp_path / "moved")
    (place.destination / ".git").symlink_to(tmp_path / "moved")
    with pytest.raises(UsageError, match="must be a directory"):
        place.export()


def test_files_that_no_export_has_written_are_kept(place: Place) -> None:
    """In a working tree of the user's other files stay, also staged ones, and a file of the same name is replaced only on request."""
    place.destination.mkdir()
    run("git", "init", "-q", "-b", "work", cwd=place.destination)
    (place.destination / ".gitattributes").write_text("*.txt text\n")
    (place.destination / "mine").write_text("mine")
    (place.destination / "same").write_text("mine")
    run("git", "add", "-A", cwd=place.destination)
    place.write(b"same", b"of the snapshot")
    with pytest.raises(DestinationExists, match="same"):
        place.export()
    assert (place.destination / "same").read_text() == "mine"
    done = place.export(overwrite=True)
    assert (done.branch, (place.destination / "same").read_text()) == ("work", "of the snapshot")
    assert run("git", "status", "--porcelain", cwd=place.destination) == b"A  mine\n"
    assert (place.destination / ".gitattributes").read_text().endswith("*.txt text\n")
    (place.destination / "other").mkdir()
    (place.destination / "other/file").write_text("x")
    place.destination = place.destination / "other"
    with pytest.raises(DestinationExists, match="neither empty nor"):
        place.export()


@pytest.mark.skipif(os.geteuid() != 0, reason="a directory of another user needs root")
def test_root_exports_to_its_own_directories_alone(place: Place, tmp_path: Path) -> None:
    """Root refuses a destination that belongs to another user, and one that others may write to."""
    place.write(b"file", b"x")
    place.destination.mkdir()
    os.chown(place.destination, _STRANGER, _STRANGER)
    with pytest.raises(NotPermitted, match="belongs to user 4321"):
        place.export()
    os.chown(place.destination, 0, 0)
    place.destination.chmod(0o777)
    with pytest.raises(NotPermitted, match="no other user may write"):
        place.export()
    place.destination.chmod(0o755)
    place.export()
    os.chown(place.destination / ".git/config", _STRANGER, _STRANGER)
    with pytest.raises(NotPermitted, match="config belongs to user 4321"):
        place.export()


def test_a_missing_program_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git-lfs the export says what to install, and makes nothing."""
    place.write(b"file", b"x")
    monkeypatch.setattr(git, "find_program", lambda name: f"/nowhere/{name}" if name == "git-lfs" else name)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/nowhere"))
    with pytest.raises(NotFound, match="git-lfs is not installed"):
        place.export()
    assert not place.destination.exists()


def test_damage_leaves_the_branch_as_it_was(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read ends the export; the branch stays, and git leaves no report of a crash."""
    place.write(b"file", b"x")
    place.export()
    head = run("git", "rev-parse", "HEAD", cwd=place.destination)
    place.write(b"file", b"y")

    def broken(self: object) -> Iterator[bytes]:
        raise CiuicError("damaged")
        yield b""

    monkeypatch.setattr(git_lfs.ExportedFile, "pieces", broken)
    with pytest.raises(CiuicError, match="damaged"):
        place.export()
    assert run("git", "rev-parse", "HEAD", cwd=place.destination) == head
    assert list((place.destination / ".git").glob("fast_import_crash*")) == []
    assert (place.destination / "file").read_text() == "x"
