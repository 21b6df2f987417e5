"""Release 0.2 and this tree, each installed by itself: commands, daemons and programs of either over the same files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from support import wheels
from support.live import CommandFailed, Listed, Live
from support.overlay import DRIVER

Version = Literal["old", "new"]
VERSIONS: Final[tuple[Version, ...]] = ("old", "new")

OLD_COMMIT: Final = "3ebbf14"
"""The state that release 0.2 was tried in."""
OLD_VERSION: Final = "0.2.0"
_PROGRAM_SECONDS = 120.0


def _environment() -> dict[str, str]:
    """Return this process's environment, without what would put this checkout in the place of an installation."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class Installations:
    """Virtual environments of both versions, in ``place``; the sources of the old one are kept beside them."""

    def __init__(self, place: Path) -> None:
        self.old_source = place / "source"
        wheels.older_source(self.old_source, OLD_COMMIT, OLD_VERSION)
        sources: dict[Version, Path] = {"old": self.old_source, "new": wheels.CHECKOUT}
        self.programs = {
            version: wheels.environment(place / version, wheels.build(source, place / f"{version}-wheel"))
            for version, source in sources.items()
        }

    def python(self, version: Version, *arguments: object) -> str:
        """Run a program with the libraries of a version; return what it printed."""
        command = [str(self.programs[version].with_name("python")), *map(str, arguments)]
        done = subprocess.run(
            command, env=_environment(), cwd="/", check=False, capture_output=True, text=True,
            timeout=_PROGRAM_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{version}: {done.stderr}"
        return done.stdout


class Upgraded(Live):
    """Ciuic of one host whose commands and daemons are of the version in ``use``."""

    def __init__(self, top: Path, installations: Installations, **options: Any) -> None:
        super().__init__(top, **options)
        self._installations = installations
        self.env.pop("PYTHONPATH", None)
        self._version: Version = "old"

    def use(self, version: Version) -> None:
        """Have the next commands and the next daemon be of this version."""
        self._version = version
        self._daemon = [str(self._installations.programs[version])]

    def run(
        self,
        *arguments: str | bytes,
        program: str = "ciuic",
        expect: int | None = 0,
        timeout_seconds: float = 120,
    ) -> subprocess.CompletedProcess[bytes]:
        if arguments[:1] == ("protect",):
            arguments = ("protect", "--driver", DRIVER, *arguments[1:])
        command: Sequence[str | bytes] = [str(self._installations.programs[self._version]), *arguments]
        done = subprocess.run(
            command, env=self.env, cwd="/", check=False, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=timeout_seconds,
        )  # fmt: skip
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        assert "Traceback" not in text, f"{self._version}: {arguments}\n{text}"
        self.require((self._version, program, *arguments), done.returncode, expect, text)
        return done

    def list(self, program: str = "ciuic") -> list[Listed]:
        return super().list(program)

    def status(self) -> dict[str, Any] | None:
        try:
            return dict(self.json("status"))
        except CommandFailed:
            return None
