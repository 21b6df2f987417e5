"""The README's five-minute story, run line by line, with programs found as sudo finds them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import wheels
from support.until import until

pytestmark = pytest.mark.mount

CHECKOUT = Path(__file__).parents[2]
PLACES = ("/opt/ciuic", "/opt/deepseek", "/var/lib/deepseek", "/usr/local/bin")
"""Paths replaced by directories of the test's own: no file outside of them is touched."""


class Machine:
    """A fresh machine: the README's paths below ``top``, a user, and sudo's rule for finding programs."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.config = top / "etc/ciuic.toml"
        for place in (*PLACES, "/etc", "/run"):
            self.path(place).mkdir(parents=True, exist_ok=True)
        self.config.write_text(
            f'[repository]\npath = "{top}/repository"\n[daemon]\nruntime_dir = "{top}/run"\n[capture]\nmin_share = "100%"\n'
        )

    def path(self, place: str) -> Path:
        return self.top / place.removeprefix("/")

    def command(self, line: str) -> list[str]:
        """Return the words that run a line, with the test's paths; sudo finds programs in its own PATH."""
        for place in PLACES:
            line = re.sub(rf"(?<![\w/]){place}\b", str(self.path(place)), line)
        words = shlex.split(line, comments=True)
        assert words[0] == "sudo", f"as a user who may not read the repository: {line}"
        assert (
            words[1] in ("python3", "ln")
            or words[1].startswith("/")
            or (self.path("/usr/local/bin") / words[1]).exists()
        ), f"sudo: {words[1]}: command not found"
        return words[1:]

    def run(self, line: str, *, code: int = 0) -> str:
        done = subprocess.run(
            self.command(line), env=self.environment(), cwd="/", capture_output=True, text=True, timeout=120,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, (line, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def environment(self) -> dict[str, str]:
        found = {key: value for key, value in os.environ.items() if not key.startswith(("CIUIC", "PYTHON"))}
        path = f"{self.path('/usr/local/bin')}:/usr/sbin:/usr/bin:/sbin:/bin"
        return found | {"CIUIC_CONFIG": str(self.config), "PATH": path}


def story() -> list[str]:
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## The five-minute story\n\n```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def test_the_checkout_is_tried_with_what_the_first_page_says() -> None:
    """The first block of the README names the commands that exist, and CI runs the one of them that says so."""
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    named = [line.partition("#")[0].split() for line in block[1].splitlines()]
    assert named == [["make", "rescue"], ["make", "test"]]
    for words in named:
        done = subprocess.run(
            [*words, "--dry-run"], cwd=CHECKOUT, check=False, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    assert "make test" in (CHECKOUT / ".ci/run").read_text(encoding="utf-8")
    assert len(text.split()) < 1000


@pytest.fixture
def machine(short_tmp: Path) -> Machine:
    return Machine(short_tmp)


def install(machine: Machine, pip: list[str]) -> None:
    """Install this checkout's wheel as `pip install ciuic` does, with the libraries of this environment."""
    wheels.install(wheels.build(CHECKOUT, machine.top / "wheels"), Path(pip[0]).with_name("python"))


def test_the_five_minute_story_as_it_stands_there(machine: Machine) -> None:
    """Every line of the story works as typed, by a user with sudo, on a host without systemd."""
    data, state = machine.path("/opt/deepseek/training"), machine.path("/var/lib/deepseek/state")
    for directory in (data / "checkpoints", state):
        directory.mkdir(parents=True)
    daemon: subprocess.Popen[bytes] | None = None
    snapshot = ""
    try:
        for line in story():
            if line.startswith("..."):
                (data / "checkpoints/newest").write_bytes(b"torn")
            elif "pip install" in line:
                install(machine, machine.command(line))
            elif "venv" in line:
                # This interpreter in place of python3: the libraries lent to the environment were built for
                # it.
                words = [sys.executable, *machine.command(line)[1:], "--without-pip"]
                subprocess.run(words, check=True, timeout=60)
            elif "service install" in line:
                result = machine.run("sudo ciuic status", code=5)
                assert "ciuic daemon" in result
                daemon = _start(machine, "sudo ciuic daemon")
                (data / "checkpoints/newest").write_bytes(b"whole")
                snapshot = machine.run("sudo ciuic snapshot --wait").split()[0]
            else:
                machine.run(line.replace("cs-38a2b1", snapshot))
        assert (data / "checkpoints/newest").read_bytes() == b"whole"
        machine.run("sudo ciuic stop")
        assert daemon is not None
        assert daemon.wait(30) == 0
    finally:
        if daemon is not None and daemon.poll() is None:
            daemon.terminate()
            daemon.wait(60)


def _start(machine: Machine, line: str) -> subprocess.Popen[bytes]:
    """Start a command that stays in the foreground, as in a terminal; return when its roots are mounted."""
    with open(machine.top / "log", "wb") as log:
        daemon = subprocess.Popen(
            machine.command(line),
            env=machine.environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def mounted() -> bool:
        assert daemon.poll() is None, (machine.top / "log").read_text()
        return Path("/proc/self/mounts").read_text().count(f"{machine.top}/") == 2

    until("the mounts", mounted)
    return daemon
