"""Trainings that are watched: real processes that beat, and an alert command that notes what it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.live import Live, wait_for

_HOOK = """#!/bin/sh
cat >> {told}
echo >> {told}
echo "$CIUIC_EVENT $CIUIC_TRAINER $CIUIC_SNAPSHOT" >> {told}.env
"""


class Hook:
    """An alert command of one's own; ``told`` is what it has read so far."""

    def __init__(self, top: Path) -> None:
        self._told = top / "told"
        self.program = top / "hook.sh"
        self.program.write_text(_HOOK.format(told=self._told))
        self.program.chmod(0o755)

    def told(self) -> list[dict[str, Any]]:
        if not self._told.exists():
            return []
        # The last line may be half written.
        return [json.loads(line) for line in self._told.read_text().split("\n")[:-1] if line]

    def environment(self) -> list[str]:
        return Path(f"{self._told}.env").read_text().splitlines()

    def wait(self, event: str, trainer: str) -> dict[str, Any]:
        """The first notice of this event about this trainer, as soon as it was told."""

        def found() -> dict[str, Any] | None:
            mine = (
                one
                for one in self.told()
                if one["event"] == event and one.get("trainer", {}).get("name") == trainer
            )
            return next(mine, None)

        try:
            return wait_for(f"{event} of {trainer}", found, 60)  # type: ignore[no-any-return]
        except TimeoutError as error:
            raise AssertionError(f"{error}; told: {self.told()}") from None


def watched(live: Live, *words: str, name: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """A command under `ciuic watch`; returns when the daemon knows of it."""
    program = str(Path(sys.executable).parent / "ciuic")
    process = subprocess.Popen(
        [program, "watch", "--name", name, *options, "--", *words], env=live.env, stdin=subprocess.DEVNULL
    )
    wait_for(f"the watch of {name}", lambda: trainer(live, name), 60)
    return process


def trainer(live: Live, name: str) -> dict[str, Any] | None:
    """Its line of `ciuic status`, None while it is not watched."""
    status = live.status()
    found = (one for one in (status or {}).get("trainers", ()) if one["name"] == name)
    return next(found, None)


def incidents(live: Live, name: str) -> list[dict[str, Any]]:
    """Newest first."""
    status = live.status()
    assert status is not None
    return [one for one in status["incidents"] if one["trainer"]["name"] == name]


def when(condition: Callable[[], Any], what: str) -> Any:
    return wait_for(what, condition, 60)


def python(text: str) -> list[str]:
    """A process that runs this."""
    return [sys.executable, "-c", text]


def signalled(pid: int, number: int) -> None:
    os.kill(pid, number)
