"""Another program unmounts the overlay: the daemon notices at once, and its report is true."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.overlay import PASSES
from support.site import Site, ended
from support.until import until

pytestmark = pytest.mark.mount


def alert_of(site: Site, root: Path) -> str:
    """Return the alert's text; empty without an alert."""
    with site.client() as client:
        alerts = {alert.key: alert.message for alert in client.status().alerts}
    return alerts.get(f"unmounted:{root}", "")


def unmount(root: Path, *options: str) -> None:
    subprocess.run(["umount", *options, str(root)], check=True, timeout=30)


def wait_for_new_mount(site: Site, root: Path, before: int) -> None:
    until(
        "mounting anew",
        lambda: (
            (status := site.root_status(root)).state == "mounted"
            and status.worker_pid != before
            and site.overlays(root) == 1
        ),
    )


@pytest.mark.parametrize("options", [(), ("-l",)], ids=["umount", "umount -l"])
def test_an_unmounted_root_without_open_files_is_mounted_again(site: Site, options: tuple[str, ...]) -> None:
    """A root without open files is mounted again at once, with no attempt to continue the ended session."""
    root = site.root("a")
    site.start()
    worker = site.root_status(root).worker_pid
    unmount(root, *options)
    wait_for_new_mount(site, root, worker)
    assert "no file was open in it" in alert_of(site, root)
    until("the worker's end", lambda: ended(worker))
    log = site.log.read_text()
    assert "session_not_taken_over" not in log
    assert "files stay open" not in log
    (root / "after").write_text("seen")
    snapshot = site.snapshot()
    assert site.content(snapshot, root, b"after") == b"seen"
    assert alert_of(site, root) == ""


def test_a_job_with_open_files_goes_on_after_an_unmount(site: Site) -> None:
    """A job with open files goes on, and the next snapshot has the writes of the old and the new mount."""
    root = site.root("a")
    site.start()
    before = site.root_status(root).worker_pid
    with open(root / "log", "w+b", buffering=0) as log:
        log.write(b"one ")
        unmount(root, "-l")
        wait_for_new_mount(site, root, before)
        assert "go on being served" in alert_of(site, root)
        assert not ended(before)
        log.write(b"two ")
        assert log.seek(0) == 0
        assert log.read() == b"one two "
        (root / "after").write_text("seen")
        if not PASSES:
            # No cut reaches data that the kernel caches for the removed overlay.
            os.fsync(log.fileno())
        snapshot = site.snapshot()
        assert site.content(snapshot, root, b"log") == b"one two "
        assert site.content(snapshot, root, b"after") == b"seen"
    until("the old worker's end", lambda: ended(before))
    assert site.root_status(root).state == "mounted"
    assert (root / "log").read_bytes() == b"one two "


def test_repeated_unmounts_do_not_end_protection(site: Site) -> None:
    """A script that unmounts the root repeatedly does not end its protection."""
    root = site.root("a")
    site.start()
    for _ in range(3):
        worker = site.root_status(root).worker_pid
        unmount(root)
        wait_for_new_mount(site, root, worker)
    (root / "after").write_text("seen")
    assert site.content(site.snapshot(), root, b"after") == b"seen"
