"""Lazy restores: a directory that is used while it is fetched, and what interrupts it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import lazy_ops, trees
from support.lazy_restores import LazyChild, LazyHost, lazy_host, shell
from support.until import until

from ciuic.fuse_layer.driver_choice import WITHOUT_PASSTHROUGH
from ciuic.lazy.changes import Change, Kind
from ciuic.lazy.progress import LazyStatus, read_statuses
from ciuic.lazy.service import MARKER, LazyRecord
from ciuic.remote.object_names import PACKS_PREFIX

pytestmark = pytest.mark.mount
_OPS = Path(lazy_ops.__file__)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LazyHost]:
    with lazy_host(tmp_path) as made:
        yield made


def fill(root: Path, seed: int = 1) -> None:
    """Make files of many sizes, with links, holes and attributes."""
    rng = random.Random(seed)
    (root / "sub" / "deeper").mkdir(parents=True)
    for number in range(24):
        path = root / ("sub" if number % 2 else "sub/deeper") / f"f{number}"
        path.write_bytes(rng.randbytes(rng.choice([0, 1, 4096, rng.randrange(40000)])))
    (root / "big").write_bytes(rng.randbytes(1 << 20))
    with open(root / "sparse", "wb") as file:
        file.truncate(300_000)
        file.seek(100_000)
        file.write(rng.randbytes(5000))
    os.link(root / "big", root / "sub" / "big too")
    os.symlink("big", root / "link")
    os.setxattr(root / "sub" / "f1", "user.kind", b"1")
    os.chmod(root / "sub" / "f3", 0o4711)
    os.chown(root / "sub", 1000, 1000)
    os.utime(root / "sub" / "f5", ns=(5, 7))
    os.chmod(root, 0o2750)
    os.utime(root, ns=(10**18, 10**18 + 1))


def assert_restored(host: LazyHost) -> None:
    assert not host.is_mounted()
    trees.assert_same(trees.manifest(host.root), trees.manifest(host.mount))
    assert not (host.mount / ".ciuic-state").exists()


def actions(top: Path, seed: int, count: int) -> subprocess.CompletedProcess[str]:
    command = ["timeout", "60", sys.executable, str(_OPS), str(top), str(seed), str(count)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def started_without_content(host: LazyHost) -> LazyChild:
    """Start a restore of a tree whose content does not come until `held` is unset."""
    fill(host.root)
    host.upload()
    host.set("held")
    return host.start().wait_for_mount()


def test_the_end_is_a_plain_directory_equal_to_the_snapshot(host: LazyHost) -> None:
    """Content, attributes, links and times are those of the snapshot when the mount is gone, and nothing of ours is left."""
    fill(host.root)
    host.upload()
    child = host.start().wait_for_mount()
    assert [words[0] for words in child.end()] == ["done"]
    assert child.process.returncode == 0
    assert_restored(host)


def test_the_tree_stands_while_nothing_is_there(host: LazyHost) -> None:
    """With a store that does not answer, names and attributes are shown as if all was there, and changes of names are carried out."""
    child = started_without_content(host)
    # Times of access and change are not restored; blocks of a file with holes are those of one without.
    form = 'cd "$1" && find . -printf "%p %y %m %U %G %s %n %T@ %l\\n" | sort'
    assert shell(form, host.mount).stdout == shell(form, host.root).stdout
    blocks = int(shell('stat -c %b "$1"', host.mount / "big").stdout)
    assert blocks * 512 >= (host.root / "big").stat().st_size
    change = 'cd "$1" && mv sub/f1 moved && rm sub/f3 && : > sub/f5 && ln sub/f7 linked && mv sub/f9 sub/f11 && echo x > sub/new'
    for top in (host.mount, host.root):
        done = shell(change, top)
        assert done.returncode == 0, done.stderr
    host.unset("held")
    child.end()
    expected = trees.manifest(host.root, directory_times=False)
    found = trees.manifest(host.mount, directory_times=False)
    for name in (b"sub/f5", b"sub/new"):
        expected[name], found[name] = (facts[name]._replace(mtime_ns=0) for facts in (expected, found))
    trees.assert_same(expected, found)


@pytest.mark.parametrize("seed", [11, 12])
def test_operations_answer_as_on_a_plain_directory(host: LazyHost, tmp_path: Path, seed: int) -> None:
    """Each of a random sequence of operations returns the same on a tree that is being fetched as on a plain copy of it."""
    fill(host.root, seed)
    host.upload()
    model = tmp_path / "model"
    subprocess.run(["cp", "-a", host.root, model], check=True)
    host.set("delay", "0.1")
    child = host.start().wait_for_mount()
    lazily = actions(host.mount, seed, 150)
    child.end()
    plainly = actions(model, seed, 150)
    assert lazily.stdout.splitlines() == plainly.stdout.splitlines(), lazily.stderr
    form = 'cd "$1" && find . -type f -printf "%p %m %s %n\\n" -exec sha256sum {} + | sort'
    assert shell(form, host.mount).stdout == shell(form, model).stdout


def test_kills_at_any_moment_leave_something_to_go_on_from(host: LazyHost) -> None:
    """After SIGKILL readers get errors and never other content, nothing is below the mount, and the next run goes on."""
    fill(host.root)
    host.upload()
    rng = random.Random(4)
    expected = (host.root / "big").read_bytes()
    host.set("delay", "0.1")
    for _ in range(4):
        child = host.start()
        if child.line()[:1] != ["ready"]:
            break
        reader = subprocess.Popen(
            ["timeout", "30", "cat", str(host.mount / "big")],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        # A moment of chance, which is what is tested.
        with contextlib.suppress(subprocess.TimeoutExpired):
            reader.wait(rng.random() * 0.1)
        child.kill()
        read, _ = reader.communicate(timeout=30)
        assert expected.startswith(read)
        if not host.is_mounted():
            # It was complete before.
            break
        assert shell('cat "$1"', host.mount / "big").returncode != 0
        shell('umount "$1"', host.mount)
        if (host.mount / os.fsdecode(MARKER)).exists():
            assert sorted(os.listdir(host.mount)) == [".ciuic-state", os.fsdecode(MARKER)]
    host.unset("delay")
    if host.is_mounted() or (host.mount / os.fsdecode(MARKER)).exists():
        host.start().end()
    assert_restored(host)


def test_a_run_after_a_kill_fetches_only_what_is_missing(host: LazyHost) -> None:
    """What was fetched before a SIGKILL, and what the job has changed since, is there without the store."""
    fill(host.root)
    (host.root / "huge").write_bytes(random.Random(9).randbytes(8 << 20))
    host.upload()
    host.set("allowed", "0")
    child = host.start().wait_for_mount()
    script = 'echo more >> "$1/sub/f1" && head -c 1000000 "$1/huge" | sha256sum'
    job = subprocess.Popen(
        ["timeout", "60", "sh", "-c", script, "sh", str(host.mount)], stdout=subprocess.PIPE
    )
    allowed = 0
    while job.poll() is None:
        # One read of the store after the other, until the job has what it wants.
        allowed += 1
        host.set("allowed", str(allowed))
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(0.02)
    first, _ = job.communicate()
    child.kill()
    host.set("held")
    host.unset("allowed")
    child = host.start().wait_for_mount()
    again = shell('head -c 1000000 "$1/huge" | sha256sum && cat "$1/sub/f1"', host.mount)
    f1 = (host.root / "sub" / "f1").read_bytes()
    assert again.stdout == first + f1 + b"more\n"
    host.unset("held")
    child.end()
    assert (host.mount / "huge").read_bytes() == (host.root / "huge").read_bytes()
    assert (host.mount / "sub" / "f1").read_bytes() == f1 + b"more\n"


def test_a_store_that_is_unplugged_delays_and_fails_reads(host: LazyHost) -> None:
    """A read fails with EIO when the store does not answer for the restore's patience; the restore goes on when it does."""
    fill(host.root)
    (host.root / "huge").write_bytes(random.Random(9).randbytes(16 << 20))
    host.upload()
    host.set("down")
    child = host.start().wait_for_mount()
    failed = shell('cat "$1"', host.mount / "huge")
    assert b"Input/output error" in failed.stderr
    assert len(failed.stdout) < 16 << 20
    host.unset("down")
    assert child.end()[-1][0] == "done"
    assert_restored(host)


@pytest.mark.parametrize("without_passthrough", ["", "1"])
def test_a_large_read_waits_for_its_data(
    host: LazyHost, monkeypatch: pytest.MonkeyPatch, without_passthrough: str
) -> None:
    """A large read of content that is not fetched yet waits for it, with and without passthrough."""
    if without_passthrough:
        monkeypatch.setenv(WITHOUT_PASSTHROUGH, without_passthrough)
    data = random.Random(10).randbytes(8 << 20)
    (host.root / "huge").write_bytes(data)
    host.upload()
    host.set("held")
    child = host.start().wait_for_mount()
    early = shell('dd if="$1" bs=1M skip=2 count=2 2>/dev/null', host.mount / "huge", timeout=3)
    # timeout(1) ended it.
    assert (early.returncode, early.stdout) == (124, b"")
    host.unset("held")
    assert shell('cat "$1"', host.mount / "huge").stdout == data
    assert child.end()[-1][0] == "done"
    assert_restored(host)


def test_a_full_disk_delays_and_fails_reads(host: LazyHost) -> None:
    """Reads fail with ENOSPC where their blocks have no room; the restore goes on when there is some."""
    (host.root / "big").write_bytes(random.Random(1).randbytes(5 << 20))
    (host.root / "small").write_bytes(b"x" * 3000)
    host.upload()
    host.dest.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3M", "tmpfs", host.dest], check=True)
    try:
        child = host.start().wait_for_mount()
        full = shell('cat "$1" > /dev/null', host.mount / "big")
        assert b"No space left" in full.stderr
        assert shell('cat "$1"', host.mount / "small").stdout == b"x" * 3000
        subprocess.run(["mount", "-o", "remount,size=20M", host.dest], check=True)
        assert child.end()[-1][0] == "done"
        assert_restored(host)
    finally:
        host.close()
        subprocess.run(["umount", "-l", host.dest], check=True)


def test_a_waiting_program_can_be_interrupted(host: LazyHost) -> None:
    """A program that waits for a file to be complete, for fallocate(2), gets its signal, and the file is complete later."""
    child = started_without_content(host)
    # -s INT: a signal that the program could handle.
    waiting = shell('timeout -s INT 0.3 fallocate -p -o 0 -l 4096 "$1"', host.mount / "big")
    assert waiting.returncode != 0
    host.unset("held")
    child.end()
    assert_restored(host)


_CHANGES = """
import os, sys
def write(path, at, data):
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, data, os.fstat(fd).st_size if at < 0 else at)
    os.fsync(fd)
    os.close(fd)
top = sys.argv[1]
write(top + "/big", 700_001, b"middle" * 3000)
write(top + "/big", -1, b"appended")
write(top + "/sparse", 0, b"s" * 300_000)
os.truncate(top + "/cut", 70_001)
os.truncate(top + "/cut", 150_000)
os.truncate(top + "/grown", 250_000)
os.utime(top + "/touched", ns=(3, 5))
fd = os.open(top + "/touched", os.O_RDONLY)
os.fsync(fd)
"""


def fill_for_changes(root: Path) -> None:
    fill(root)
    for name in ("cut", "grown", "touched"):
        (root / name).write_bytes(random.Random(name).randbytes(200_000))


def change(top: Path) -> None:
    done = subprocess.run(
        ["timeout", "30", sys.executable, "-c", _CHANGES, str(top)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def same_times_apart(host: LazyHost, plain: Path) -> None:
    """Compare content and attributes; times only where a program has set them."""
    form = 'cd "$1" && find . -type f -printf "%p %m %s %n\\n" -exec sha256sum {} + | sort && stat -c %Y%y touched'
    assert shell(form, host.mount).stdout == shell(form, plain).stdout


@pytest.mark.parametrize("killed", [False, True])
def test_changes_wait_for_nothing_and_stay(host: LazyHost, tmp_path: Path, killed: bool) -> None:
    """With a store that does not answer, writes, new sizes and times are carried out; they stay, also after SIGKILL, and the rest is fetched around them."""
    fill_for_changes(host.root)
    host.upload()
    model = tmp_path / "model"
    subprocess.run(["cp", "-a", host.root, model], check=True)
    host.set("held")
    child = host.start().wait_for_mount()
    for top in (host.mount, model):
        change(top)
    if killed:
        child.kill()
        child = host.start().wait_for_mount()
    # What the job has written whole is read back without the store.
    assert shell('head -c 300000 "$1" | tr -d s | wc -c', host.mount / "sparse").stdout == b"0\n"
    assert shell('stat -c %s "$1"', host.mount / "cut").stdout == b"150000\n"
    host.unset("held")
    child.end()
    assert child.process.returncode == 0
    same_times_apart(host, model)


_WRITER = """
import os, random, sys
top, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)
fd = os.open(top + "/cut", os.O_RDWR)
for number in range(1, 100_000):
    size = os.fstat(fd).st_size
    kind, at = rng.choice("wwwwa<>"), rng.randrange(size + 1)
    if kind in "<>":
        line = f"size {at if kind == '<' else size + 5000}"
    else:
        line = f"write {size if kind == 'a' else at} {number} {rng.randrange(1, 60_000)}"
    print("begin", line, flush=True)
    words = line.split()
    if words[0] == "size":
        os.ftruncate(fd, int(words[1]) or 1)
    else:
        os.pwrite(fd, random.Random(int(words[2])).randbytes(int(words[3])), int(words[1]))
    os.fsync(fd)
    print("done", line, flush=True)
"""


def apply_changes(content: bytearray, words: list[str]) -> None:
    if words[0] == "size":
        size = int(words[1]) or 1
        content[:] = content[:size].ljust(size, b"\0")
    else:
        at, seed, length = map(int, words[1:])
        content[len(content) :] = bytes(max(0, at - len(content)))
        content[at : at + length] = random.Random(seed).randbytes(length)


def assert_acknowledged(found: bytes | bytearray, before: bytearray, after: bytearray) -> None:
    """Assert that each byte is that of before or after the change that was under way."""
    assert len(found) in (len(before), len(after))
    both = zip(found, before.ljust(len(found), b"\0"), after.ljust(len(found), b"\0"), strict=False)
    wrong = [at for at, (byte, old, new) in enumerate(both) if byte not in (old, new)]
    assert not wrong, (len(wrong), wrong[:3])


@pytest.mark.parametrize("seed", [2, 3])
def test_a_kill_between_changes_leaves_all_that_were_acknowledged(host: LazyHost, seed: int) -> None:
    """After SIGKILL at any moment of synced writes, appends and new sizes, each byte is that of the last acknowledged change, or of the one under way."""
    fill_for_changes(host.root)
    host.upload()
    before = content = bytearray((host.root / "cut").read_bytes())
    rng = random.Random(seed)
    host.set("held")
    for run in range(3):
        child = host.start().wait_for_mount()
        if run == 1:
            # Some of the content comes between two kills.
            host.unset("held")
            host.set("delay", "0.05")
        command = ["timeout", "30", sys.executable, "-c", _WRITER, str(host.mount), str(seed * 10 + run)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(rng.randrange(2, 40))]
            child.kill()
            lines += writer.stdout.read().splitlines()
        before = bytearray(content)
        begun: list[str] = []
        for words in (line.split() for line in lines):
            if words[0] == "begin":
                begun = words[1:]
            elif words[0] == "done":
                apply_changes(content, words[1:])
                before, begun = bytearray(content), []
        if begun:
            apply_changes(content, begun)
        shell('umount "$1"', host.mount)
        host.unset("held")
        if not (host.mount / os.fsdecode(MARKER)).exists():
            break
        child = host.start().wait_for_mount()
        found = bytearray(shell('cat "$1"', host.mount / "cut").stdout)
        assert_acknowledged(found, before, content)
        # What was under way when it was killed is there or not, from now on.
        before = content = found
        child.kill()
        shell('umount "$1"', host.mount)
        if not (host.mount / os.fsdecode(MARKER)).exists():
            break
        host.set("held")
    host.unset("held")
    if (host.mount / os.fsdecode(MARKER)).exists():
        host.start().end()
    assert_acknowledged((host.mount / "cut").read_bytes(), before, content)


def test_after_a_power_cut_synced_changes_stay_and_others_may_go(host: LazyHost, tmp_path: Path) -> None:
    """When the machine was started anew, what was synced is there; a write that was not is as if it had not been made."""
    fill_for_changes(host.root)
    host.upload()
    model = tmp_path / "model"
    subprocess.run(["cp", "-a", host.root, model], check=True)
    host.set("held")
    child = host.start().wait_for_mount()
    for top in (host.mount, model):
        change(top)
    state = host.mount / ".ciuic-state" / "lazy-restore"
    child.kill()
    shell('umount "$1"', host.mount)
    # A write of which only the record has come to the disk: the bytes that it stands for have not.
    for journal in (state / "changes").iterdir():
        with open(journal, "ab") as file:
            file.write(Change(Kind.WRITE, 1000, 90_000, 9).encode())
    record = LazyRecord.decode((state / "record").read_bytes())
    assert not record.boot
    record.used_in = "another start of the machine"
    (state / "record").write_bytes(record.encode())
    host.start().wait_for_mount().kill()
    # By the second run in the same start of the machine it is still known what counts.
    child = host.start().wait_for_mount()
    host.unset("held")
    child.end()
    same_times_apart(host, model)


def _damage_big(host: LazyHost) -> None:
    """Damage a chunk of the file ``big`` on the remote."""
    assert host.snapshot is not None
    marker = (host.root / "big").read_bytes()[600_000:600_064]
    damaged = 0
    for path in (host.place / "remote" / PACKS_PREFIX.rstrip("/")).rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(marker)) >= 0:
            with open(path, "r+b") as file:
                file.seek(at)
                file.write(bytes(64))
            damaged += 1
    assert damaged


def test_damaged_content_fails_its_readers_alone(host: LazyHost) -> None:
    """A damaged chunk gives EIO; all else is restored; the file is left out in the end, named, and the exit code is 8."""
    fill(host.root)
    host.upload()
    _damage_big(host)
    host.set("held")
    child = host.start().wait_for_mount()
    reader = subprocess.Popen(
        ["timeout", "30", "cat", str(host.mount / "big")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    host.unset("held")
    read, errors = reader.communicate(timeout=30)
    assert b"Input/output error" in errors
    assert (host.root / "big").read_bytes().startswith(read)
    assert len(read) < 600_000
    lines = child.end()
    assert child.process.returncode == 8
    assert [words[0] for words in lines].count("lost") == 2
    expected = trees.manifest(host.root, directory_times=False)
    del expected[b"big"], expected[b"sub/big too"]
    trees.assert_same(expected, trees.manifest(host.mount, directory_times=False))


def test_what_a_job_wrote_to_a_damaged_file_is_kept(host: LazyHost) -> None:
    """A file with a damaged chunk to which a job has written gets another name, with what the job wrote."""
    fill(host.root)
    host.upload()
    _damage_big(host)
    host.set("held")
    child = host.start().wait_for_mount()
    whole = (host.root / "big").read_bytes()
    fd = os.open(host.mount / "big", os.O_WRONLY)
    try:
        assert os.pwrite(fd, b"of the job", 100) == 10
        assert os.pwrite(fd, b"and longer", len(whole)) == 10
    finally:
        os.close(fd)
    host.unset("held")
    lines = child.end()
    assert child.process.returncode == 8
    assert [words[0] for words in lines].count("lost") == 2
    assert not (host.mount / "big").exists()
    kept = (host.mount / "big.ciuic-damaged").read_bytes()
    assert (len(kept), kept[100:110], kept[-10:]) == (len(whole) + 10, b"of the job", b"and longer")
    assert kept[:100] == whole[:100]


def status_of(host: LazyHost) -> LazyStatus:
    (status,) = read_statuses(host.control / "status")
    return status


def job_in(host: LazyHost, command: list[str], says: str) -> subprocess.Popen[bytes]:
    """Start a shell with the mount as its argument, and return it when it has said this."""
    job = subprocess.Popen([*command, "sh", str(host.mount)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout is not None
    assert job.stdout.readline() == f"{says}\n".encode()
    return job


def test_open_files_outlive_the_mount(host: LazyHost) -> None:
    """A program that has a file open, and does not work in the directory, goes on when the mount is taken away."""
    child = started_without_content(host)
    script = 'exec 3< "$1/big" 4>> "$1/log" && echo open && read line && cat <&3 && echo later >&4'
    job = job_in(host, ["timeout", "60", "sh", "-c", script], "open")
    host.unset("held")
    until("the end of the mount", lambda: not host.is_mounted())
    out, _ = job.communicate(b"\n", timeout=30)
    assert out == (host.root / "big").read_bytes()
    assert (host.mount / "log").read_bytes() == b"later\n"
    assert child.end()[-1][0] == "done"


def test_a_program_that_works_in_the_directory_keeps_it(host: LazyHost) -> None:
    """A program that works in the directory is named and goes on when everything is there; its end is that of the mount."""
    child = started_without_content(host)
    script = (
        'cd "$1/sub" && exec 3< ../big 4>> ../log && echo open && read line'
        ' && cat <&3 && echo later >&4 && ls .. && test "$(/bin/pwd -P)" = "$1/sub"'
    )
    job = job_in(host, ["sh", "-c", script], "open")
    host.unset("held")
    until("a program that waits", lambda: f"sh (pid {job.pid})" in status_of(host).waits)
    assert status_of(host).state == "closing"
    assert host.is_mounted()
    out, _ = job.communicate(b"\n", timeout=30)
    assert job.returncode == 0
    assert out.startswith((host.root / "big").read_bytes())
    assert (host.mount / "log").read_bytes() == b"later\n"
    assert child.end()[-1][0] == "done"
    assert not host.is_mounted()


def test_a_removed_file_is_read_to_its_end(host: LazyHost) -> None:
    """A program that has opened a file and removed its name gets its content, which was not there at the time."""
    child = started_without_content(host)
    script = 'exec 3< "$1/sub/f1" && rm "$1/sub/f1" && echo removed && cat <&3'
    job = job_in(host, ["timeout", "60", "sh", "-c", script], "removed")
    host.unset("held")
    out, _ = job.communicate(timeout=30)
    assert out == (host.root / "sub" / "f1").read_bytes()
    child.end()


def test_sigterm_ends_it_so_that_it_can_go_on(host: LazyHost) -> None:
    """SIGTERM, and an operator's umount, end the process without a mount; the next run completes the directory."""
    child = started_without_content(host)
    child.process.send_signal(signal.SIGTERM)
    host.unset("held")
    child.end()
    host.close()
    host.set("held")
    child = host.start().wait_for_mount()
    assert shell('umount "$1"', host.mount).returncode == 0
    assert child.line()[:2] == ["error", "1"]
    host.unset("held")
    host.start().end()
    assert_restored(host)


def test_a_destination_in_use_is_refused(host: LazyHost) -> None:
    """A directory with something in it, one of another restore, and one that another process restores are refused."""
    fill(host.root)
    host.upload()
    host.mount.mkdir(parents=True)
    (host.mount / "mine").write_text("")
    assert host.start().line()[:2] == ["error", "6"]
    (host.mount / "mine").unlink()
    host.set("held")
    first = host.start().wait_for_mount()
    assert host.start().line()[:2] == ["error", "75"]
    first.kill()
    shell('umount "$1"', host.mount)
    (host.root / "another").write_text("x")
    before = host.snapshot
    host.upload()
    assert host.start().line()[:2] == ["error", "6"]
    host.snapshot = before
    (host.root / "another").unlink()
    host.unset("held")
    host.start().end()
    expected, found = (trees.manifest(top, directory_times=False) for top in (host.root, host.mount))
    trees.assert_same(expected, found)
