"""Host that is lost when another one takes over, for scripts that get a URL and a key and nothing else."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path

from support.remote_training import wait_until

from ciuic.remote.sealing.slot_secret import make_key_file
from ciuic.repository import Repository
from ciuic.training.remote.uploads import is_uploading, record_of, state_dir


def take_over(host: str, remote: str) -> str:
    """Have this process use the directories of a host alone, once others have uploaded; return the remote's URL.

    Args:
        host: Directory of the host, which is new.
        remote: Directory of the remote. Key and list of hosts are beside it.
    """
    key, hosts = f"{remote}.key", Path(f"{remote}.hosts")
    if not os.path.exists(key):
        make_key_file(key)
    if hosts.exists():
        lose_last(remote)
    hosts.write_text(f"{host}\n")
    os.environ["CIUIC_REMOTE_KEY_FILE"] = key
    os.environ["XDG_CACHE_HOME"] = f"{host}/cache"
    os.environ["XDG_STATE_HOME"] = f"{host}/state"
    return f"file://{remote}"


def lose_last(remote: str) -> None:
    """Remove the last host of a remote when its uploads have ended, which outlive its training."""
    host = Path(Path(f"{remote}.hosts").read_text().strip())
    for save_dir in (host / "state/ciuic/trainings").iterdir():
        wait_until(partial(_is_done, str(save_dir)))
    shutil.rmtree(host)


def _is_done(save_dir: str) -> bool:
    """Return whether everything is uploaded, and nothing runs that would write to the directory."""
    place = state_dir(save_dir)
    with Repository.open(save_dir) as repository:
        records = (
            [record_of(save_dir, name, repository.id) for name in os.listdir(place)] if place.is_dir() else []
        )
        stored = [record is not None and record.stored >= repository.snapshots.names() for record in records]
    return (
        bool(stored) and all(stored) and not any(is_uploading(save_dir, name) for name in os.listdir(place))
    )
