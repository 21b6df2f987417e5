"""Machine that never saw a host: it has a URL, a secret and an empty home, and runs the installed command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support import trees


class Elsewhere:
    """Machine with the URL and a secret, and an empty home."""

    def __init__(self, place: Path, url: str, secrets: Mapping[str, str]) -> None:
        self.place = place
        self.home = place / "home"
        self.home.mkdir(mode=0o700)
        self.url = url
        self.secrets = dict(secrets)
        """Variables beyond those of every machine; also where the server is."""
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
        }

    def start(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command; any exit code is accepted."""
        return subprocess.run(
            [sys.executable, "-m", "ciuic", "--repo", self.url, *arguments],
            env=self.environment | self.secrets,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=300,
            check=False,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run a command that ends with this code; return its output."""
        done = self.start(*arguments)
        assert done.returncode == code, done.stderr.decode()
        return done.stdout.decode() + (done.stderr.decode() if code else "")

    def listed(self) -> set[str]:
        """Return the ids of all snapshots."""
        lines = self.run("list", "--machine-readable").splitlines()
        return {line.split("|")[0] for line in lines}

    def differences(self, id_: str, root: Path, expected: trees.Manifest) -> list[str]:
        """Restore a root into a directory of its own; return what is not as it was."""
        there = self.place / id_
        # --special: also from a remote in clear, whose content is the test's own.
        self.run("restore", "-s", id_, "-p", str(root), "-d", str(there), "--special")
        return trees.differences(expected, trees.manifest(there / root.name))
