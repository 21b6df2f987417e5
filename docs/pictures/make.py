"""Draw the pictures of this directory: the commands of an operator, run for real on pseudo-terminals.

Run as root from a checkout: ``.venv/bin/python docs/pictures/make.py``. It protects a directory below /tmp, takes snapshots
while files change, damages the files, and records what the commands print: terminal.svg at 92 columns, looking-60.svg and looking-120.svg
at 60 and 120; pick-60.svg and pick-120.svg are what `ciuic pick` shows in tmux. Nothing is edited afterwards.
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

import numpy as np
from rich.console import Console
from rich.text import Text
from safetensors.numpy import save_file

COLUMNS, ROWS = 92, 40
TOP = Path("/tmp/ciuic-picture")
TRAINING = Path("/tmp/run42")
PICTURES = Path(__file__).parent
CIUIC = [sys.executable, "-m", "ciuic"]


def environment() -> dict[str, str]:
    """Return the environment of the commands: a configuration of their own, and a terminal with colours."""
    found = {key: value for key, value in os.environ.items() if not key.startswith("CIUIC")}
    return found | {"CIUIC_CONFIG": str(TOP / "ciuic.toml"), "TERM": "xterm-256color", "TZ": "UTC"}


def on_terminal(command: list[str], columns: int = COLUMNS) -> str:
    """Run a command on a pseudo-terminal and return what it printed, with its colours."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
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


def on_screen(command: list[str], columns: int, keys: list[tuple[str, str]]) -> str:
    """Run a command in tmux, press each key when the screen has the text before it and is at rest, and return the last screen."""
    tmux = ["tmux", "-L", "ciuic-picture", "-f", os.devnull]

    def screen() -> str:
        shot = subprocess.run([*tmux, "capture-pane", "-p", "-e"], check=True, capture_output=True, text=True)
        return shot.stdout.rstrip("\n")

    line = shlex.join(command)
    size = ["-x", str(columns), "-y", "28"]
    subprocess.run([*tmux, "new-session", "-d", *size, line], env=environment(), cwd="/", check=True)
    try:
        for text, key in keys:
            before = ""
            while text not in (now := screen()) or "reading" in now or now != before:
                before = now
                time.sleep(0.5)
            if key:
                subprocess.run([*tmux, "send-keys", *key.split()], check=True)
        return now
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


class Recording:
    """Lines of the picture."""

    def __init__(self, name: str, columns: int = COLUMNS) -> None:
        self._name = name
        self._columns = columns
        self._console = Console(record=True, width=columns, file=open(os.devnull, "w"), force_terminal=True)

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
        answer = on_terminal([*CIUIC, *words[1:]] if words[0] == "ciuic" else words, self._columns)
        self.show(answer)
        self._console.print()
        return Text.from_ansi(answer).plain

    def show(self, screen: str) -> None:
        """Add what a terminal shows, with its colours."""
        self._console.print(Text.from_ansi(screen))

    def save(self) -> None:
        """Write the picture."""
        self._console.save_svg(str(PICTURES / f"{self._name}.svg"), title="ciuic")


STATE = {
    f"layers.{layer}.{name}": np.random.default_rng(layer).normal(0, 0.02, shape).astype("f4")
    for layer in range(4)
    for name, shape in (("attention.weight", (768, 768)), ("mlp.weight", (768, 1024)), ("norm.bias", (768,)))
}


def train(checkpoint: int) -> None:
    """Write what a training would: a checkpoint, one that is overwritten, and a line of its log."""
    folder = TRAINING / "checkpoints"
    folder.mkdir(exist_ok=True)
    for number, array in enumerate(STATE.values()):
        array += np.random.default_rng(checkpoint + number).normal(0, 4e-4, array.shape).astype("f4")
    save_file(STATE, folder / f"step-{checkpoint}.safetensors")
    save_file(STATE, folder / "last.safetensors.new")
    os.replace(folder / "last.safetensors.new", folder / "last.safetensors")
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


def snapshot() -> None:
    """Take one, and wait for it."""
    subprocess.run([*CIUIC, "snapshot", "--wait"], env=environment(), check=True, capture_output=True)


def play() -> None:
    """Run the commands of the pictures."""
    for step in (2000, 3000):
        train(step)
        snapshot()
    picture = Recording("terminal")
    shutil.rmtree(TRAINING / "checkpoints")
    picture.say("3 a.m.: the checkpoints are gone")
    newest = picture.run("ciuic list").strip().splitlines()
    chosen = next(word for line in newest for word in line.split() if word.startswith("cs-"))
    picture.run(f"ciuic verify {chosen} --checksum")
    picture.run(f"ciuic restore -s {chosen} -p {TRAINING}/checkpoints -d {TRAINING} --overwrite")
    picture.run(f"ls -sh {TRAINING}/checkpoints")
    picture.save()
    # A layer jumps, then NaN spreads, and at last a save is torn.
    STATE["layers.2.mlp.weight"] *= 3
    train(4000)
    snapshot()
    STATE["layers.2.mlp.weight"][:40] = np.nan
    train(5000)
    snapshot()
    whole = TRAINING / "checkpoints/step-5000.safetensors"
    (TRAINING / "checkpoints/step-6000.safetensors").write_bytes(whole.read_bytes()[: 5 << 20])
    snapshot()
    for columns in (60, 120):
        picture = Recording(f"looking-{columns}", columns)
        picture.run("ciuic list")
        picture.run("ciuic checkpoints -n 4")
        picture.run(f"ciuic tensors {TRAINING}/checkpoints/last.safetensors --history")
        picture.run(f"ciuic history {TRAINING}/checkpoints/last.safetensors")
        picture.run("ciuic stats")
        picture.save()
        picture = Recording(f"pick-{columns}", columns)
        checkpoint = f"{TRAINING}/checkpoints/last.safetensors"
        keys = [("12 tensors", "Enter Down"), ("12 tensors", "")]
        picture.show(on_screen([*CIUIC, "pick", checkpoint], columns, keys))
        picture.save()


if __name__ == "__main__":
    main()
