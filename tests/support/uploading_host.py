"""Host that uploads with the installed command, and is killed, lost, and brought back from its remote alone."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from support import trees
from support.elsewhere import Elsewhere
from support.live import installed, wait_for
from support.remote_commands import Host
from support.restoring import take, write

from ciuic.protocol.stored_remotely import read_record
from ciuic.remote.access import add_slot, init_remote, open_remote
from ciuic.remote.format.documents import LogCommit, decode_log_entry
from ciuic.remote.format.names import LOGS_PREFIX, parse_log_entry
from ciuic.remote.objects.model import Objects
from ciuic.remote.sealing.recovery_key import RECOVERY_KEY_BYTES, show_recovery_key
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.remote.sealing.slot_secret import recovery_secret
from ciuic.repository import Repository
from ciuic.repository.repository import DEFAULT_BLOCK_SIZE

_STORED_SECONDS = 600


class UploadingHost(Host):
    """Host with a root, a repository, and `ciuic remote upload` as a process that a test starts and kills.

    Args:
        top: Directory of the host; missing.
        url: Place of the remote, which is made.
        objects: The same place, not through a proxy.
        environment: Where the server is for the host's commands, and its credentials.
        sealed: Whether the remote is encrypted.
    """

    def __init__(
        self, top: Path, url: str, objects: Objects, environment: Mapping[str, str], *, sealed: bool = True
    ) -> None:
        super().__init__(top)
        self.url = url
        self.env.update(environment)
        self.root = top / "root"
        self.root.mkdir()
        self.taken: dict[str, trees.Manifest] = {}
        """Files that each snapshot has to bring back."""
        # Not by `remote init`, whose proof of create-only takes SeaweedFS ten seconds.
        remote = init_remote(
            objects, master=MasterKey.generate() if sealed else None, block_size=DEFAULT_BLOCK_SIZE
        )
        self._recovery_key = show_recovery_key(os.urandom(RECOVERY_KEY_BYTES)) if sealed else None
        if self._recovery_key is not None:
            add_slot(remote, "recovery", recovery_secret(self._recovery_key))
            self.env["CIUIC_REMOTE_RECOVERY_KEY"] = self._recovery_key
        self.run("remote", "join", url, *([] if sealed else ["--no-encryption"]))
        self.env.pop("CIUIC_REMOTE_RECOVERY_KEY", None)
        self._upload: subprocess.Popen[bytes] | None = None

    def secrets(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return what a machine elsewhere needs: where the server is, and the recovery key."""
        key = {} if self._recovery_key is None else {"CIUIC_REMOTE_RECOVERY_KEY": self._recovery_key}
        return {**environment, **key}

    def change(self, rng: random.Random, size_bytes: int) -> None:
        """Write files with so many new bytes, and change and remove some of the earlier ones."""
        old = sorted(path for path in self.root.glob("new-*") if path.is_file())
        for path in rng.sample(old, len(old) // 3):
            path.unlink()
        for path in rng.sample(old, len(old) // 3):
            if path.exists():
                with open(path, "r+b") as file:
                    file.seek(rng.randrange(path.stat().st_size))
                    file.write(rng.randbytes(100))
        count = rng.randint(2, 6)
        for _ in range(count):
            write(self.root / f"new-{rng.getrandbits(40):010x}", rng.randbytes(size_bytes // count))

    def snapshot_root(self) -> str:
        """Take a snapshot of the root, and remember what it has to bring back."""
        with Repository.open(self.repository) as repository:
            id_ = str(take(repository, self.root).id)
        self.taken[id_] = trees.manifest(self.root)
        return id_

    # -- the process

    def start_upload(self) -> subprocess.Popen[bytes]:
        """Start the process that uploads."""
        with open(self.top / "upload.log", "ab") as log:
            self._upload = subprocess.Popen(
                [str(installed()), "remote", "upload"],
                env=self.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self._upload

    def kill_upload(self) -> None:
        """Send SIGKILL to the process, if there is one."""
        if self._upload is not None:
            self._upload.kill()
            self._upload.wait()
            self._upload = None

    def stored(self) -> set[str]:
        """Return the snapshots that the process says are stored."""
        record = read_record("remote", self.state)
        return set() if record is None else set(record.stored)

    def wait_stored(self, seconds: float = _STORED_SECONDS) -> None:
        """Wait until the running process has stored every snapshot."""

        def all_stored() -> bool:
            assert self._upload is not None
            assert self._upload.poll() is None, (self.top / "upload.log").read_text()
            return self.taken.keys() <= self.stored()

        wait_for("the upload", all_stored, seconds)

    def lose(self) -> None:
        """Kill what runs, and remove everything that the host has."""
        self.kill_upload()
        self.close()
        shutil.rmtree(self.top)

    # -- the remote

    def commits(self, objects: Objects) -> Counter[str]:
        """Return how many commits the logs of the remote have of each snapshot."""
        secrets = [] if self._recovery_key is None else [recovery_secret(self._recovery_key)]
        remote = open_remote(objects, secrets)
        found: Counter[str] = Counter()
        for info in remote.objects.list(LOGS_PREFIX):
            position = parse_log_entry(info.name)
            assert position is not None, info.name
            data = bytes(remote.objects.get(info.name))
            entry = decode_log_entry(remote.sealer, position.writer, position.number, data)
            if isinstance(entry, LogCommit):
                found[entry.snapshot] += 1
        return found

    def flaws(
        self, objects: Objects, place: Path, environment: Mapping[str, str], *, maybe: str = ""
    ) -> list[str]:
        """Read the remote on another machine; return what is lost, changed, or committed twice.

        Args:
            objects: The remote, not through a proxy.
            place: Directory of the other machine; made here.
            environment: Where the server is, and its credentials.
            maybe: Snapshot whose upload was under way when the host was lost: it may be there, whole.
        """
        place.mkdir()
        elsewhere = Elsewhere(place, self.url, self.secrets(environment))
        listed = elsewhere.listed()
        wanted = self.taken.keys() - {maybe}
        flaws = [f"{id_} is lost" for id_ in wanted - listed]
        flaws += [f"{id_} was never taken" for id_ in listed - self.taken.keys()]
        for id_, count in self.commits(objects).items():
            if count != 1:
                flaws.append(f"{id_} was committed {count} times")
        verified = elsewhere.start("verify", "--all", "--checksum")
        if verified.returncode != 0:
            flaws.append((verified.stdout + verified.stderr).decode())
        for id_ in listed & self.taken.keys():
            flaws += [f"{id_}: {line}" for line in elsewhere.differences(id_, self.root, self.taken[id_])]
        shutil.rmtree(place)
        return flaws
