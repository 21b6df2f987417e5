"""Other users of the machine: what they can reach of a running ciuic, tried by processes of those users."""

from __future__ import annotations

import grp
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.live import Live, installed
from support.overlay import state_of
from support.second_user import MADE_UP, NOBODY, User, everything_below, reach, run_as
from support.until import until

from ciuic.repository import Repository
from ciuic.system.privileges import CAPTURE, OVERLAY_WORKER, Capability, permitted

pytestmark = pytest.mark.mount
_HOLD_LOCK = (
    "import sys; from pathlib import Path; from ciuic.repository import Repository;"
    "r = Repository.open(Path(sys.argv[1])); w = r.writer(wait_seconds=30).__enter__(); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def short_tmp(short_tmp: Path, run_dir: Path) -> Path:
    """Return a directory that every user can enter, so that only ciuic's own permissions keep users out."""
    run_dir.chmod(0o755)
    short_tmp.chmod(0o755)
    return short_tmp


def _status(pid: int) -> dict[str, str]:
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {key: value.strip() for key, _, value in lines}


def _mask(capabilities: frozenset[Capability]) -> str:
    return f"{sum(1 << number for number in capabilities & permitted()):016x}"


def _pids(live: Live, module: str) -> list[int]:
    return [pid for pid, command in live.processes().items() if f"-m {module} " in f"{command} "]


@contextmanager
def _capture_waiting(live: Live) -> Iterator[str]:
    """Cut a snapshot whose capture waits for the repository, so that all of ciuic's files are on disk."""
    holder = subprocess.Popen(
        [str(installed("python")), "-c", _HOLD_LOCK, str(live.repository)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        snapshot = live.run("snapshot").stdout.decode().split()[0]
        until("the capture", lambda: _pids(live, "ciuic.daemon.capture.process"))
        yield snapshot
    finally:
        holder.communicate(timeout=30)
    until("the snapshot", lambda: snapshot in [listed.id for listed in live.list()])


@pytest.mark.skipif(Capability.SYS_PTRACE not in permitted(), reason="captures keep everything then")
def test_workers_and_captures_have_only_the_documented_capabilities(protected: Live, root: Path) -> None:
    """The serving worker and a capture at work have the documented capabilities, and can gain none."""
    (root / "file").write_text("x")
    with _capture_waiting(protected):
        (capture,) = _pids(protected, "ciuic.daemon.capture.process")
        until("giving up", lambda: _status(capture)["CapPrm"] == _mask(CAPTURE))
        (worker,) = _pids(protected, "ciuic.fuse_layer.worker")
        for pid, kept in ((capture, CAPTURE), (worker, OVERLAY_WORKER)):
            now = _status(pid)
            assert (now["CapPrm"], now["CapEff"], now["NoNewPrivs"]) == (_mask(kept), _mask(kept), "1")
            assert (int(now["CapInh"], 16), int(now["CapAmb"], 16)) == (0, 0)


def test_a_user_gains_no_access_to_protected_files(live: Live, root: Path, short_tmp: Path) -> None:
    """Another user reaches only the names of sockets, also with old content in the undo log.

    Neither through the mount nor behind it, nor after the end.
    """
    bind_mount = short_tmp / "behind"
    bind_mount.mkdir()
    # The mode that systemd sets.
    (live.top / "run").chmod(0o755)
    root.chmod(0o755)
    for name, mode in (("public", 0o644), ("secret", 0o600), ("gone", 0o600), ("renamed", 0o600)):
        (root / name).write_bytes(os.urandom(600_000))
        (root / name).chmod(mode)
    subprocess.run(["mount", "--bind", root, bind_mount], check=True)
    try:
        live.run("protect", str(root))
        live.start(root)
        until("the first snapshot", live.list)
        with _capture_waiting(live):
            with open(root / "public", "r+b") as file:
                file.write(b"new" * 1000)
            # Its old content is not for users who may not read the file now.
            (root / "public").chmod(0o600)
            (root / "gone").unlink()
            (root / "renamed").rename(root / "renamed too")
            with open(root / "secret", "r+b") as file:
                file.truncate(5)
            _assert_unreachable(live, root, bind_mount, working=True)
        _assert_unreachable(live, root, bind_mount, working=False)
        live.stop()
        _assert_unreachable(live, root, bind_mount, working=False)
    finally:
        subprocess.run(["umount", "-l", bind_mount], check=True)


def _assert_unreachable(live: Live, root: Path, bind_mount: Path, *, working: bool) -> None:
    state = state_of(root)
    run = live.top / "run"
    paths = everything_below(live.repository, run, root, bind_mount, state.parent)
    if working:
        assert any(path.startswith(str(state / "undo/hold/")) for path in paths)
        assert any(path.startswith(str(state / "undo/blocks-")) for path in paths)
    allowed = {str(path) for path in (root, bind_mount, run) if path.exists()}
    for user in (NOBODY, MADE_UP):
        assert reach(user, paths) == allowed


def test_nothing_in_the_runtime_directory_is_readable_under_any_umask(live: Live, root: Path) -> None:
    """With umask 0, and with so many names that the session's journal has an archive, others open nothing: neither names nor locks."""
    before = os.umask(0)
    try:
        live.run("protect", str(root))
        live.start(root)
        run = live.top / "run"
        run.chmod(0o755)
        (root / "private").mkdir(0o700)
        for number in range(30_000):
            os.mkfifo(root / "private" / f"a name that others may not know {number}")
        until("the archive", lambda: list(run.glob("**/*.archive-*")))
        paths = everything_below(run, live.config.parent / f".{live.config.name}.lock")
        for user in (NOBODY, MADE_UP):
            assert reach(user, paths) == {str(run)}
    finally:
        os.umask(before)


def test_a_lock_that_others_hold_keeps_no_daemon_from_starting(live: Live, root: Path) -> None:
    """A file with the name of the daemon's lock, readable as earlier versions made it, can no longer be locked once a daemon has run."""
    run = live.top / "run"
    run.chmod(0o755)
    (run / "daemon.lock").touch(0o644)
    live.run("protect", str(root))
    live.start(root)
    assert (run / "daemon.lock").stat().st_mode & 0o777 == 0o600
    script = "fd = os.open(sys.argv[1], os.O_RDONLY)\nfcntl.flock(fd, fcntl.LOCK_EX)"
    for lock in (run / "daemon.lock", live.config.with_name(f".{live.config.name}.lock")):
        assert "PermissionError" in run_as(NOBODY, script, str(lock), imports="import fcntl").stderr


def test_the_control_sockets_are_for_root_alone(protected: Live) -> None:
    """Another user, and one with root's group, cannot connect to the daemon's socket nor to a worker's."""
    run = protected.top / "run"
    run.chmod(0o755)
    sockets = [
        path for path in run.iterdir() if path.is_socket() and path.name.startswith(("control", "worker-"))
    ]
    assert len(sockets) == 2
    for user in (NOBODY, MADE_UP, User(54321, 0, (0, 4321))):
        assert reach(user, sockets) == set()
    assert reach(User(0, 0), sockets) == set(map(str, sockets))


def test_the_group_of_the_control_socket_gets_that_socket_and_no_other(short_tmp: Path, root: Path) -> None:
    """Members of `[control] group` may ask the daemon, others may not, and workers' sockets stay root's."""
    group = next(entry for entry in grp.getgrall() if entry.gr_gid not in (0, 65534))
    with Live(short_tmp, more_config=f'\n[control]\ngroup = "{group.gr_name}"\n') as live:
        live.run("protect", str(root))
        live.start(root)
        (live.top / "run").chmod(0o755)
        sockets = [path for path in (live.top / "run").iterdir() if path.is_socket()]
        control = str(live.top / "run/control.sock")
        assert reach(User(54321, group.gr_gid), sockets) == {control}
        assert reach(User(54321, 54321, (group.gr_gid,)), sockets) == {control}
        assert reach(MADE_UP, sockets) == set()
        live.stop()


def test_a_worker_checks_peer_credentials_besides_the_socket_mode(protected: Live) -> None:
    """A worker whose socket's mode was opened by mistake answers root only (peer credentials)."""
    (protected.top / "run").chmod(0o755)
    (worker,) = (protected.top / "run").glob("worker-*.sock")
    worker.chmod(0o666)
    script = r"""
body = b"\x81\xa2do\xa6status"
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    try:
        sock.sendall(len(body).to_bytes(4, "little") + body)
        print(len(sock.recv(100)))
    except (BrokenPipeError, ConnectionResetError):
        print(0)
"""
    answers = [
        run_as(user, script, str(worker)).stdout.strip()
        for user in (NOBODY, MADE_UP, User(54321, 0), User(0, 0))
    ]
    assert answers[:3] == ["0", "0", "0"]
    assert int(answers[3]) > 10


_CLI = """
import importlib, pathlib
import ciuic.cli, encodings.idna, rich.progress
top = pathlib.Path(ciuic.__file__).parent
for folder in ("system", "protocol", "repository", "compare", "restore", "maintenance", "config", "cli"):
    for file in (top / folder).rglob("*.py"):
        name = ".".join(file.relative_to(top).with_suffix("").parts)
        if file.stem not in ("__init__", "__main__") and name != "cli.commands.daemon":
            importlib.import_module("ciuic." + name)
import ciuic.daemon.capture.process
os.environ["HOME"] = "/nonexistent"
"""
_RUN = "os.environ['CIUIC_CONFIG'] = sys.argv[1]; sys.argv = ['ciuic', *sys.argv[2:]]; sys.exit(ciuic.cli.main())"
_TAKE = "sys.exit(ciuic.daemon.capture.process.main(sys.argv[1:]))"


def _cli(live: Live, user: User, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_as(user, _RUN, str(live.config), *arguments, imports=_CLI)


def _create(path: Path) -> None:
    Repository.create(path).close()


def test_the_commands_of_an_ordinary_user_on_roots_repository(live: Live, root: Path) -> None:
    """An ordinary user's commands on root's repository end with 7 and reveal nothing."""
    (root / "file").write_text("never to be seen")
    _create(live.repository)
    _capture(live, User(0, 0), root)
    live.config.chmod(0o644)
    out = _open_to_all(live.top / "out")
    for arguments in (
        ["list"],
        ["show", "latest"],
        ["diff", "latest", str(root)],
        ["verify", "latest"],
        ["restore", "-s", "latest", "-p", str(root), "-d", str(out)],
    ):
        done = _cli(live, MADE_UP, *arguments)
        assert done.returncode == 7, (arguments, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert "never" not in done.stdout
    assert list(out.iterdir()) == []


def test_an_ordinary_user_snapshots_and_restores_own_files(live: Live, root: Path) -> None:
    """An ordinary user can snapshot own files into a private repository and restore them.

    Unreadable files are named and left out.
    """
    owner = MADE_UP
    home = _open_to_all(live.top / "home")
    (root / "mine").write_text("mine")
    (root / "mine").chmod(0o600)
    (root / "roots").write_text("not his")
    (root / "roots").chmod(0o600)
    for path in (root, root / "mine"):
        os.chown(path, owner.uid, owner.gid)
    live.config.write_text(f'[repository]\npath = "{home}/repository"\n')
    live.config.chmod(0o644)
    run_as(
        owner, "ciuic.repository.Repository.create(sys.argv[1])", f"{home}/repository", imports=_CLI
    ).check_returncode()
    done = run_as(
        owner, _TAKE, "--offline", "--repo", f"{home}/repository", "--root", str(root), imports=_CLI
    )
    assert (done.returncode, "Permission denied" in done.stdout) == (0, True), done.stderr
    restored = _cli(live, owner, "restore", "-s", "latest", "-p", str(root), "-d", f"{home}/out")
    assert restored.returncode == 0, restored.stderr
    assert {path.name: path.read_text() for path in (home / "out/root").iterdir()} == {"mine": "mine"}
    facts = (home / "out/root/mine").stat()
    assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o7777) == (owner.uid, owner.gid, 0o600)
    assert reach(NOBODY, everything_below(home / "repository")) == set()


def test_only_root_restores_setuid_files_of_others(live: Live, root: Path) -> None:
    """A restore by another user makes root's setuid program a plain file of that user, and makes no device.

    The owner is named as the only thing missing.
    """
    home = _open_to_all(live.top / "home")
    (root / "program").write_text("#!/bin/sh")
    os.chown(root / "program", 0, 0)
    (root / "program").chmod(0o6755)
    os.mknod(root / "device", stat.S_IFBLK | 0o666, os.makedev(7, 200))
    _create(live.repository)
    _capture(live, User(0, 0), root)
    for path in everything_below(live.repository):
        os.chown(path, *MADE_UP[:2])
    live.config.chmod(0o644)
    done = _cli(live, MADE_UP, "restore", "-s", "latest", "-p", str(root), "-d", str(home))
    assert done.returncode == 8, done.stderr
    facts = (home / "root/program").stat()
    assert (facts.st_uid, facts.st_mode & 0o7777) == (MADE_UP.uid, 0o755)
    assert not (home / "root/device").exists()


def _open_to_all(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o777)
    return path


def _capture(live: Live, user: User, root: Path) -> None:
    done = run_as(user, _TAKE, "--offline", "--repo", str(live.repository), "--root", str(root), imports=_CLI)
    done.check_returncode()
