"""Opens that a killed worker carried out and did not answer, by programs that are killed before a successor does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.overlay import DRIVER, Overlay
from support.until import until

from ciuic.fuse_layer.journal import journal_writer

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(DRIVER != "kernel", reason="sessions outlive the workers of the kernel driver alone"),
]

# Takes the place of `python -m ciuic.fuse_layer.worker`. Its system calls are filtered: it can kill nobody.
_WORKER = """
import os, sys, time
from ciuic.fuse_layer import fuse_protocol as p, worker
from ciuic.fuse_layer.kernel.session import KernelSession

place = PLACE
answer, resend = KernelSession._answer, KernelSession.resend

def dying(self, request, error, reply):
    if request.opcode in (p.OPEN, p.CREATE, p.OPENDIR) and os.path.exists(place + "/dies"):
        os.unlink(place + "/dies")
        os._exit(1)
    return answer(self, request, error, reply)

def killing(self):
    resend(self)
    open(place + "/resent", "w").close()
    while not os.path.exists(place + "/killed"):
        time.sleep(0.01)

KernelSession._answer, KernelSession.resend = dying, killing
sys.exit(worker.main(sys.argv[3:]))
"""


def _is_exiting(pid: int) -> bool:
    """Return whether a process takes part in nothing any more (PF_EXITING of proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return bool(int(fields[6]) & 4)


def _open_in(place: Path) -> bool:
    """Return whether the journal has a handle."""
    inherited = journal_writer.replay(place / "w.sock.ledger")
    assert inherited is not None
    return bool(inherited.files or inherited.directories)


@pytest.mark.parametrize(
    "flags",
    [os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_RDONLY | os.O_DIRECTORY],
    ids=["open", "create", "opendir"],
)
def test_a_handle_whose_program_was_killed_before_the_answer_is_closed(short_tmp: Path, flags: int) -> None:
    """The successor answers the open before the kernel sends it again, so that a killed program's handle is released."""
    root = short_tmp / "root"
    (root / "directory").mkdir(parents=True)
    (root / "file").touch()
    name = "directory" if flags & os.O_DIRECTORY else "new" if flags & os.O_CREAT else "file"
    script = short_tmp / "worker.py"
    script.write_text(_WORKER.replace("PLACE", repr(str(short_tmp))))
    with Overlay(root, short_tmp / "w.sock", interpreter=(sys.executable, str(script))) as overlay:
        overlay.keep_session()
        (short_tmp / "dies").touch()
        code = f"import os; os.open({str(root / name)!r}, {flags}); input()"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as job:

            def kill() -> None:
                until("the successor", (short_tmp / "resent").exists)
                job.kill()
                # Not for its end: what it has open is closed by requests to the successor.
                until("its death", lambda: _is_exiting(job.pid))
                (short_tmp / "killed").touch()

            killer = threading.Thread(target=kill)
            killer.start()
            overlay.succeed()
            killer.join()
        until("the release", lambda: not _open_in(short_tmp))
