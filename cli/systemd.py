"""What the service command does to systemd: unit files in one directory, and calls of systemctl.

Guarantees: unit files are replaced atomically; only files that this module writes are removed. Everything outside
(directories, the systemctl program) comes in as an argument.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ciuic.child_process import find_program, program_environment
from ciuic.cli.shipped import shipped_text
from ciuic.errors import CiuicError, NotPermitted

UNITS: Final = (
    "ciuic.service",
    "ciuic-workers.service",
    "ciuic-workers.socket",
    "ciuic-capture.slice",
    "ciuic-scrub.service",
    "ciuic-scrub.timer",
)
_ENABLED: Final = ("ciuic.service", "ciuic-scrub.timer")
_DROP_INS: Final = ("ciuic.service.d/config.conf", "ciuic-scrub.service.d/config.conf")


@dataclass(frozen=True)
class Systemd:
    """The machine's systemd."""

    unit_dir: Path = Path("/etc/systemd/system")
    running_mark: Path = Path("/run/systemd/system")
    """The directory whose presence means that systemd is the running init (sd_booted(3))."""
    systemctl: str = "systemctl"

    @property
    def runs(self) -> bool:
        return self.running_mark.is_dir() and shutil.which(find_program(self.systemctl)) is not None

    def require(self) -> None:
        """CiuicError where systemd does not run this machine."""
        if not self.runs:
            raise CiuicError(
                "systemd does not run this machine, so there is no service to manage",
                hint="run `ciuic daemon` under whatever does; it stays in the foreground and ends on SIGTERM",
            )

    def install(self, program: Path, *, config: Path | None, start: bool) -> list[Path]:
        """Writes the units for ``program``, enables them and (re)starts the service. Returns what was written."""
        written = []
        for name in UNITS:
            text = for_program(unit_text(name), program)
            self._replace(self.unit_dir / name, text)
            written.append(self.unit_dir / name)
        for drop_in in (self.unit_dir / name for name in _DROP_INS):
            if config is not None:
                self._replace(drop_in, f"[Service]\nEnvironment={_quoted(f'CIUIC_CONFIG={config}')}\n")
                written.append(drop_in)
            elif drop_in.exists():
                drop_in.unlink()
        self.call("daemon-reload")
        self.call("enable", *_ENABLED)
        if start:
            self.call("restart", *_ENABLED)
        return written

    def uninstall(self) -> list[Path]:
        """Stops and disables the service and removes the units. Returns what was removed."""
        present = [path for path in (self.unit_dir / name for name in (*UNITS, *_DROP_INS)) if path.exists()]
        if not present:
            return []
        self.call("disable", "--now", *(name for name in _ENABLED if self.unit_dir / name in present))
        if (
            self.unit_dir / "ciuic-workers.socket" in present
        ):  # started by ciuic.service, and left by it to the next start
            self.call("stop", "ciuic-workers.socket")
        for path in present:
            self._unlink(path)
        for name in _DROP_INS:
            drop_in_dir = (self.unit_dir / name).parent
            if drop_in_dir.is_dir() and not any(drop_in_dir.iterdir()):
                drop_in_dir.rmdir()
        self.call("daemon-reload")
        return present

    def facts(self) -> dict[str, Any]:
        """Installed or not, and what systemctl says of it."""
        installed = (self.unit_dir / "ciuic.service").exists()
        shown: dict[str, str] = {}
        if installed:
            wanted = "ActiveState,SubState,UnitFileState,MainPID,StatusText"
            text = self.call("show", "ciuic.service", f"--property={wanted}")
            shown = dict(line.partition("=")[::2] for line in text.splitlines())
        return {
            "installed": installed,
            "active": shown.get("ActiveState", "inactive"),
            "enabled": shown.get("UnitFileState", "disabled") or "disabled",
            "pid": int(shown.get("MainPID", "0") or 0) or None,
            "text": shown.get("StatusText", ""),
        }

    def call(self, *arguments: str) -> str:
        """Runs systemctl; its complaint becomes the error's message."""
        result = subprocess.run(
            [find_program(self.systemctl), *arguments],
            env=program_environment(),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if result.returncode != 0:
            said = result.stderr.strip() or result.stdout.strip() or f"exit status {result.returncode}"
            raise CiuicError(f"systemctl {arguments[0]} failed: {said}", hint="see: journalctl -xeu ciuic")
        return result.stdout

    def _replace(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except PermissionError as error:
            raise NotPermitted(f"{path} may not be written", hint="run it as root") from error
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), 0o644)
        os.replace(temporary, path)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink()
        except PermissionError as error:
            raise NotPermitted(f"{path} may not be removed", hint="run it as root") from error


def unit_text(name: str) -> str:
    """The unit file as shipped."""
    return shipped_text("systemd", name)


def for_program(text: str, program: Path) -> str:
    """The unit with each ``Exec…=`` line that names a ``ciuic`` running ``program`` instead."""
    lines = []
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        words = value.split()
        if key.startswith("Exec") and words and os.path.basename(words[0]) == "ciuic":
            line = key + equals + " ".join([_quoted(str(program)), *words[1:]])
        lines.append(line)
    return "\n".join(lines) + "\n"


def this_program() -> Path:
    """The absolute path of the installed command that runs now, or of ``ciuic`` beside its interpreter."""
    for candidate in (Path(sys.argv[0]), Path(sys.executable).with_name("ciuic")):
        found = shutil.which(candidate) if candidate.name in ("ciuic", "ciuric") else None
        if found:
            return Path(os.path.abspath(found)).with_name("ciuic")
    raise CiuicError(
        "the installed `ciuic` command is not to be found", hint="install the package: pip install ciuic"
    )


def _quoted(text: str) -> str:
    """As one word of a unit file: percent and backslash mean something to systemd."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if any(character.isspace() for character in text) else text
