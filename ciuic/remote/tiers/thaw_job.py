"""Job of a thaw: which packs were asked for, kept on this host until they are ready.

The store decides what is ready; the job says what to ask it. Asking again changes nothing, so that a job that is lost, or made a
second time by another host, costs requests and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from ciuic.remote.objects.storage_classes import ThawSpeed
from ciuic.repository.notes import read_note, write_note

ROOT_DIRECTORY: Final = Path("/var/lib/ciuic/thaw")
"""Directory of the jobs of root, unless XDG_STATE_HOME says otherwise."""
_SUFFIX: Final = ".thaw"

PackState = Literal["wanted", "asked", "ready"]


class ThawJob(msgspec.Struct, kw_only=True):
    """Thaw of what some snapshots need."""

    id: str
    """16 hexadecimal digits."""
    url: str
    """URL of the remote."""
    snapshots: tuple[str, ...]
    paths: tuple[str, ...] = ()
    """Absolute paths, for people; none for everything."""
    speed: ThawSpeed
    days: int
    created_ns: int
    size_bytes: int
    """Bytes of all packs."""
    packs: dict[str, PackState]
    """State of each pack, by the space's prefix and the name of the object."""
    ready_by_ns: int | None = None
    """Time by which the store's documentation lets everything be ready; None if nothing has to be waited for."""
    polled_ns: int = 0
    """Time at which the store was asked last."""

    @property
    def waiting(self) -> list[str]:
        """Packs that are not ready."""
        return sorted(name for name, state in self.packs.items() if state != "ready")

    @property
    def unasked(self) -> list[str]:
        """Packs that were not asked for yet."""
        return sorted(name for name, state in self.packs.items() if state == "wanted")

    @property
    def is_ready(self) -> bool:
        """True if everything can be read."""
        return not self.waiting


class ThawJobs:
    """Jobs in a directory of this host.

    Args:
        path: The directory; made when the first job is stored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def store(self, job: ThawJob) -> None:
        """Store a job in place of its earlier state; durable on return.

        Raises:
            OSError: the disk refuses.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_note(str(self.path), f"{job.id}{_SUFFIX}", job, durable=True)

    def all(self) -> list[ThawJob]:
        """Return all jobs, the oldest first; files that are none are passed over."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        jobs = [
            job
            for name in names
            if name.endswith(_SUFFIX) and (job := read_note(str(self.path), name, ThawJob)) is not None
        ]
        return sorted(jobs, key=lambda job: (job.created_ns, job.id))

    def remove(self, job: ThawJob) -> None:
        """Forget a job."""
        (self.path / f"{job.id}{_SUFFIX}").unlink(missing_ok=True)


def jobs_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the jobs of this user lie.

    It is ``$XDG_STATE_HOME/ciuic/thaw`` if that is set, else /var/lib/ciuic/thaw for root and ~/.local/state/ciuic/thaw
    for others.
    """
    variables = os.environ if environ is None else environ
    if (home := variables.get("XDG_STATE_HOME", "")).startswith("/"):
        return Path(home) / "ciuic" / "thaw"
    if os.geteuid() == 0:
        return ROOT_DIRECTORY
    return Path(variables.get("HOME") or os.path.expanduser("~")) / ".local" / "state" / "ciuic" / "thaw"
