"""Host whose commands on remotes are run as installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.cli_repository import CliRepository
from support.live import Live

from ciuic.repository import Repository


class Host(Live):
    """One host: configuration, key file, repository and state of the upload below a directory of its own."""

    def __init__(self, top: Path) -> None:
        top.mkdir()
        super().__init__(top)
        self.state = top / "upload"
        self.env["CIUIC_UPLOAD_STATE"] = str(self.state)
        for name in ("PASSPHRASE", "KEY_FILE", "RECOVERY_KEY"):
            self.env.pop(f"CIUIC_REMOTE_{name}", None)
        self.key_file = top / "remote-remote.key"

    def snapshot_of(self, *contents: bytes) -> str:
        """Commit a snapshot of one file for each content, without a daemon; return the id of the last."""
        made = CliRepository(self.repository, self.top / "root", make=False)
        return [str(made.snapshot({b"file": content})) for content in contents][-1]

    def identity(self) -> Any:
        with Repository.open(self.repository) as repository:
            return repository.identity

    def fails(self, *arguments: str, code: int) -> str:
        """Run a command that must fail with this code, and return what it said."""
        return self.run(*arguments, expect=code).stderr.decode()
