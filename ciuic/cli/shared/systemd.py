"""Installation below systemd: unit files in one directory, calls of systemctl, and the files that are installed with the program.

Guarantees: unit files are replaced atomically; only files that this module writes are removed. Everything outside
(directories, the systemctl program) comes in as an argument.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from ciuic.errors import CiuicError, NotPermitted, pip_install
from ciuic.protocol.stored_remotely import DEFAULT_STATE_DIR
from ciuic.system.child_process import find_program, program_environment
from ciuic.system.disk import Disk

if TYPE_CHECKING:
    from ciuic.config import RemoteConfig


def shipped_text(folder: str, name: str) -> str:
    """The file as shipped: in data/ of the installed package, or in the folder of a checkout."""
    # The wheel has the files in ciuic/data; an editable installation runs from the checkout, which has them
    # at the top.
    package = Path(str(resources.files("ciuic")))
    for candidate in (package / "data" / folder / name, package.parent / folder / name):
        if candidate.is_file():
            return candidate.read_text(encoding="utf-8")
    raise CiuicError(
        f"this installation lacks the file {folder}/{name}",
        hint="install ciuic again, as a package or with pip",
    )


UNITS: Final = (
    "ciuic.service",
    "ciuic-workers.service",
    "ciuic-workers.socket",
    "ciuic-capture.slice",
    "ciuic-scrub.service",
    "ciuic-scrub.timer",
    "ciuic-upload.service",
    "ciuic-drill.service",
    "ciuic-drill.timer",
    "ciuic-exporter.service",
    "ciuic-web.service",
)
# These start the others: ciuic.service requires the socket, which starts the workers, and the timers
# scrub and drill. Upload and drill end by themselves where no remote is configured, and the exporter where no address is.
# The page is for who wants it.
_ENABLED: Final = (
    "ciuic.service",
    "ciuic-scrub.timer",
    "ciuic-upload.service",
    "ciuic-drill.timer",
    "ciuic-exporter.service",
)
_PAGE: Final = "ciuic-web.service"
# Drop-ins, because the units themselves are replaced by each installation. All services read the same file.
_DROP_INS: Final = (
    "ciuic.service.d/config.conf",
    "ciuic-scrub.service.d/config.conf",
    "ciuic-upload.service.d/config.conf",
    "ciuic-drill.service.d/config.conf",
    "ciuic-exporter.service.d/config.conf",
    "ciuic-web.service.d/config.conf",
)
_PLACES: Final = ("ciuic-upload.service.d/places.conf", "ciuic-drill.service.d/places.conf")
"""Drop-ins of the units that write to a remote that is a directory."""


def directories_of(remotes: Iterable[RemoteConfig]) -> list[Path]:
    """Return the directories of remotes with a ``file://`` URL."""
    return [Path(unquote(urlsplit(one.url).path)) for one in remotes if one.url.startswith("file://")]


@dataclass(frozen=True)
class Systemd:
    """Systemd of this machine."""

    unit_dir: Path = Path("/etc/systemd/system")
    running_mark: Path = Path("/run/systemd/system")
    """The directory whose presence means that systemd is the running init (sd_booted(3))."""
    systemctl: str = "systemctl"
    upload_state_dir: Path = DEFAULT_STATE_DIR

    @property
    def runs(self) -> bool:
        """Return True if systemd runs this machine."""
        # Both, because an image may have the program without systemd running in its container.
        return self.running_mark.is_dir() and shutil.which(find_program(self.systemctl)) is not None

    def require(self) -> None:
        """Raise CiuicError unless systemd runs this machine."""
        if not self.runs:
            raise CiuicError(
                "systemd does not run this machine, so there is no service to manage",
                hint="run `ciuic daemon` under whatever does; it stays in the foreground and ends on SIGTERM",
            )

    def install(
        self, program: Path, *, config: Path | None, start: bool, places: Sequence[Path] = ()
    ) -> list[Path]:
        """Write the units for ``program``, enable them and (re)start the service; ``places`` as of `write_places`.

        Returns the files written.
        """
        written = []
        for name in UNITS:
            text = for_program(unit_text(name), program)
            self._replace(self.unit_dir / name, text)
            written.append(self.unit_dir / name)
        for drop_in in (self.unit_dir / name for name in _DROP_INS):
            if config is not None:
                self._replace(drop_in, f"[Service]\nEnvironment={_quoted(f'CIUIC_CONFIG={config}')}\n")
                written.append(drop_in)
            # Installed again without --config: the service must not go on with the file of an earlier
            # installation.
            elif drop_in.exists():
                drop_in.unlink()
        written += self.write_places(places)
        self._hand_over_upload_state()
        # systemd keeps the units that it has read until then.
        self.call("daemon-reload")
        self.call("enable", *_ENABLED)
        if start:
            # restart, and not start: a service that runs must take over a new version. Workers and mounts
            # stay as they are.
            self.call("restart", *_ENABLED)
            self.call("try-restart", _PAGE)
        return written

    def has_places(self, places: Sequence[Path]) -> bool:
        """Return whether the unit that uploads may write to these directories."""
        drop_in = self.unit_dir / _PLACES[0]
        return not places or (drop_in.exists() and drop_in.read_text() == _places_text(places))

    def write_places(self, places: Sequence[Path]) -> list[Path]:
        """Let the units of remotes write to these directories, as the user who owns the first; return the files written.

        The units see them read-only otherwise. Without directories the drop-ins are removed. systemd reads them at its next reload.
        """
        drop_ins = [self.unit_dir / name for name in _PLACES]
        for drop_in in drop_ins:
            if places:
                self._replace(drop_in, _places_text(places))
            elif drop_in.exists():
                self._unlink(drop_in)
        return drop_ins if places else []

    def _hand_over_upload_state(self) -> None:
        """Move the state that `ciuic remote upload`, run by root, has left to where the service's own user keeps it.

        systemd moves the directory itself (systemd.exec(5), DynamicUser=), by rename(2) alone: in a container, whose root is an
        overlayfs, that fails with EXDEV and the service with status 238.
        """
        state = self.upload_state_dir
        private = state.parent / "private" / state.name
        if state.is_dir() and not state.is_symlink() and not os.path.lexists(private):
            private.parent.mkdir(mode=0o700, exist_ok=True)
            shutil.move(state, private)
            state.symlink_to(f"private/{state.name}")

    def uninstall(self) -> list[Path]:
        """Stop and disable the service and remove the units. Returns the files removed."""
        present = [
            path
            for path in (self.unit_dir / name for name in (*UNITS, *_DROP_INS, *_PLACES))
            if path.exists()
        ]
        if not present:
            return []
        self.call(
            "disable", "--now", *(name for name in (*_ENABLED, _PAGE) if self.unit_dir / name in present)
        )
        # Started by ciuic.service, and left by it to the next start.
        if self.unit_dir / "ciuic-workers.socket" in present:
            self.call("stop", "ciuic-workers.socket")
        for path in present:
            self._unlink(path)
        for name in (*_DROP_INS, *_PLACES):
            drop_in_dir = (self.unit_dir / name).parent
            # It may have drop-ins of the operator's.
            if drop_in_dir.is_dir() and not any(drop_in_dir.iterdir()):
                drop_in_dir.rmdir()
        self.call("daemon-reload")
        return present

    def facts(self) -> dict[str, Any]:
        """Return whether the unit is installed, and what systemctl reports of it; ``upload``: of that unit."""
        return {**self._facts_of("ciuic.service"), "upload": self._facts_of("ciuic-upload.service")}

    def _facts_of(self, unit: str) -> dict[str, Any]:
        installed = (self.unit_dir / unit).exists()
        shown: dict[str, str] = {}
        if installed:
            wanted = "ActiveState,SubState,UnitFileState,MainPID,StatusText"
            # `show` has a stable format of key=value, and exits with 0 for a unit that has failed; `status`
            # has neither.
            text = self.call("show", unit, f"--property={wanted}")
            shown = dict(line.partition("=")[::2] for line in text.splitlines())
        return {
            "installed": installed,
            "active": shown.get("ActiveState", "inactive"),
            "enabled": shown.get("UnitFileState", "disabled") or "disabled",
            "pid": int(shown.get("MainPID", "0") or 0) or None,
            "text": shown.get("StatusText", ""),
        }

    def call(self, *arguments: str) -> str:
        """Run systemctl; its stderr becomes the error's message."""
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
            # Unit files are readable by everybody; they have no secrets. systemd passes over the temporary name, which is no unit's.
            Disk().replace_file(path, text.encode(), mode=0o644, durable=False, shared=True)
        except PermissionError as error:
            raise NotPermitted(f"{path} may not be written", hint="run it as root") from error

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink()
        except PermissionError as error:
            raise NotPermitted(f"{path} may not be removed", hint="run it as root") from error


def unit_text(name: str) -> str:
    """Return the text of a unit file as shipped."""
    return shipped_text("systemd", name)


def _places_text(places: Sequence[Path]) -> str:
    # An unmounted file server: the unit waits for its mount, and is started again until the directory is there.
    lines = ["[Unit]", *(f"RequiresMountsFor={_quoted(str(place))}" for place in places)]
    lines += ["[Service]", "DynamicUser=no", f"User={_owner(places[0])}"]
    return "\n".join([*lines, *(f"ReadWritePaths={_quoted(str(place))}" for place in places)]) + "\n"


def _owner(place: Path) -> int:
    """Return the user of a directory or, where there is none yet, of the one above."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return place.stat().st_uid


def for_program(text: str, program: Path) -> str:
    """Return the unit with ``program`` in each ``Exec…=`` line that names a ``ciuic``."""
    lines = []
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        words = value.split()
        # ExecStart= and others; programs that are not ours, such as kill in ExecReload=, stay as they are.
        if key.startswith("Exec") and words and os.path.basename(words[0]) == "ciuic":
            line = key + equals + " ".join([_quoted(str(program)), *words[1:]])
        lines.append(line)
    return "\n".join(lines) + "\n"


def this_interpreter() -> Path:
    """Return the file of the interpreter that runs this program."""
    return Path(os.path.realpath(sys.executable))


def this_program() -> Path:
    """Return the absolute path of the running installed command, or of ``ciuic`` beside its interpreter."""
    # `python -m ciuic` has no path that a unit could run; the interpreter's directory has the installed
    # command then.
    for candidate in (Path(sys.argv[0]), Path(sys.executable).with_name("ciuic")):
        found = shutil.which(candidate) if candidate.name in ("ciuic", "ciuric") else None
        if found:
            return Path(os.path.abspath(found)).with_name("ciuic")
    raise CiuicError(
        "the installed `ciuic` command is not to be found",
        hint=f"install the package: {pip_install('ciuic')}",
    )


def _quoted(text: str) -> str:
    """Quote one word of a unit file, in which percent and backslash have a meaning."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if any(character.isspace() for character in text) else text
