"""Draw docs/pictures/terminal.svg: the commands of an operator, run for real on a pseudo-terminal of 92 columns.

Run as root from a checkout: ``.venv/bin/python docs/pictures/make.py``. It protects a directory below /tmp, takes snapshots
while files change, damages the files, and records what the commands print. Nothing is edited afterwards.
"""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 92, 40
TOP = Path("/tmp/ciuic-picture")
TRAINING = Path("/tmp/run42")
PICTURE = Path(__file__).with_name("terminal.svg")
CIUIC = [sys.executable, "-m", "ciuic"]


def environment() -> dict[str, str]:
    """Return the environment of the commands: a configuration of their own, and a terminal with colours."""
    found = {key: value for key, value in os.environ.items() if not key.startswith("CIUIC")}
    return found | {"CIUIC_CONFIG": str(TOP / "ciuic.toml"), "TERM": "xterm-256color", "TZ": "UTC"}


def on_terminal(command: list[str]) -> str:
    """Run a command on a pseudo-terminal and return what it printed, with its colours."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    printed = bytearray()
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment(), cwd="/"):
        os.close(child)
        try:
            while block := os.read(parent, 65536):
                printed += block
        except OSError:  # EIO: the command has ended, and nobody has the other side open
            pass
    os.close(parent)
    # A progress line is drawn over itself; what stays is the text after the last return to its beginning.
    lines = printed.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rsplit("\r", 1)[-1] for line in lines).rstrip("\n")


class Recording:
    """Lines of the picture."""

    def __init__(self) -> None:
        self._console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)

    def say(self, comment: str) -> None:
        """Add a comment between commands."""
        self._console.print(Text(f"# {comment}", style="dim"))

    def run(self, line: str) -> str:
        """Type ``line``, run it, add both line and answer, and return the answer."""
        self._console.print(
            Text("$ ", style="bold green")
            + Text(f"sudo {line}" if line.startswith("ciuic") else line, style="bold")
        )
        words = shlex.split(line)
        answer = on_terminal([*CIUIC, *words[1:]] if words[0] == "ciuic" else words)
        self._console.print(Text.from_ansi(answer))
        self._console.print()
        return Text.from_ansi(answer).plain

    def save(self) -> None:
        """Write the picture."""
        self._console.save_svg(str(PICTURE), title="ciuic")


def train(checkpoint: int) -> None:
    """Write what a training would: a checkpoint, and a line of its log."""
    folder = TRAINING / "checkpoints"
    folder.mkdir(exist_ok=True)
    (folder / f"step-{checkpoint}.safetensors").write_bytes(os.urandom(24 << 20))
    with open(TRAINING / "train.log", "a") as log:
        log.write(f"step {checkpoint} saved\n")


def main() -> None:
    """Play the story and draw it."""
    shutil.rmtree(TOP, ignore_errors=True)
    TOP.mkdir()
    TRAINING.mkdir()  # an error if somebody has a directory of this name
    (TOP / "ciuic.toml").write_text(
        f'[repository]\npath = "{TOP}/repository"\n[daemon]\nruntime_dir = "{TOP}/run"\n'
        f'[[root]]\npath = "{TRAINING}"\n'
    )
    train(1000)
    with open(TOP / "daemon.log", "wb") as log:
        daemon = subprocess.Popen(
            [*CIUIC, "daemon"], env=environment(), cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        while subprocess.run(
            [*CIUIC, "status"], env=environment(), capture_output=True, check=False
        ).returncode:
            time.sleep(0.2)
        play()
    finally:
        subprocess.run([*CIUIC, "stop"], env=environment(), check=False, capture_output=True)
        daemon.wait(60)
        shutil.rmtree(TRAINING)
        shutil.rmtree(TOP)


def play() -> None:
    """Run the commands of the picture."""
    quiet = {"env": environment(), "check": True, "capture_output": True}
    for step in (2000, 3000):
        train(step)
        subprocess.run([*CIUIC, "snapshot", "--wait"], **quiet)
    picture = Recording()
    shutil.rmtree(TRAINING / "checkpoints")
    picture.say("3 a.m.: the checkpoints are gone")
    newest = picture.run("ciuic list").strip().splitlines()
    snapshot = next(word for line in newest for word in line.split() if word.startswith("cs-"))
    picture.run(f"ciuic verify {snapshot} --checksum")
    picture.run(f"ciuic restore -s {snapshot} -p {TRAINING}/checkpoints -d {TRAINING} --overwrite")
    picture.run(f"ls -sh {TRAINING}/checkpoints")
    picture.save()


if __name__ == "__main__":
    main()
