"""Lazy restores under random operations, compared with a plain copy, and under SIGKILL, from a slow store."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support import lazy_ops, trees
from support.lazy_restores import LazyHost, lazy_host, shell
from torture.figure import Figure

_OPERATIONS = 200
_SUMS = 'cd "$1" && find . -type f -printf "%p %m %s %n\\n" -exec sha256sum {} + | sort'


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: operations that answered as on a plain directory, and kills after which the tree was exact."""
    end, dice = time.monotonic() + seconds, random.Random(seed)
    compared = killed = 0
    failures: list[str] = []
    while time.monotonic() < end and not failures:
        number = dice.randrange(10**6)
        place = Path(tempfile.mkdtemp(prefix="lazy-"))
        with lazy_host(place) as host:
            _make_tree(host.root, random.Random(number))
            host.upload()
            compared += _compare(host, number, failures)
        shutil.rmtree(place)
        place = Path(tempfile.mkdtemp(prefix="lazy-"))
        with lazy_host(place) as host:
            _make_tree(host.root, random.Random(number))
            host.upload()
            killed += _kill(host, random.Random(number), failures)
        shutil.rmtree(place)
    return [
        Figure("operations on lazily restored trees, compared with plain ones", compared, tuple(failures)),
        Figure("lazy restores killed, and gone on with", killed),
    ]


def _make_tree(root: Path, dice: random.Random) -> None:
    (root / "sub").mkdir()
    for number in range(40):
        path = root / dice.choice([".", "sub"]) / f"f{number}"
        path.write_bytes(dice.randbytes(dice.choice([0, 100, 4096, 30_000, 900_000])))
        if dice.random() < 0.2:
            os.link(path, root / f"link{number}")


def _actions(top: Path, seed: int) -> list[str]:
    command = [
        *("timeout", "300", sys.executable, str(lazy_ops.__file__)),
        *(str(top), str(seed), str(_OPERATIONS)),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def _compare(host: LazyHost, seed: int, failures: list[str]) -> int:
    model = host.place / "model"
    subprocess.run(["cp", "-a", host.root, model], check=True)
    host.set("delay", str(random.Random(seed).choice([0.01, 0.1, 0.5])))
    child = host.start().wait_for_mount()
    lazily = _actions(host.mount, seed)
    child.end()
    plainly = _actions(model, seed)
    failures += [
        f"seed {seed}: {one!r} where a plain directory has {other!r}"
        for one, other in zip(lazily, plainly, strict=False)
        if one != other
    ][:1]
    if len(lazily) != _OPERATIONS:
        failures.append(f"seed {seed}: {len(lazily)} operations answered")
    if shell(_SUMS, host.mount).stdout != shell(_SUMS, model).stdout:
        failures.append(f"seed {seed}: the trees differ in the end")
    return len(lazily)


def _kill(host: LazyHost, dice: random.Random, failures: list[str]) -> int:
    kills = 0
    host.set("delay", "0.05")
    names = [path for path in trees.manifest(host.root) if (host.root / os.fsdecode(path)).is_file()]
    for _ in range(5):
        child = host.start()
        # Sometimes while the tree is being made.
        if dice.random() < 0.3:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(dice.random())
        elif child.line()[:1] == ["ready"]:
            name = os.fsdecode(dice.choice(names))
            read = shell('cat "$1"', host.mount / name)
            if read.returncode == 0 and read.stdout != (host.root / name).read_bytes():
                failures.append(f"{name} was read with another content")
        if child.process.poll() is not None:
            break
        child.kill()
        kills += 1
        shell('umount "$1"', host.mount)
    host.unset("delay")
    lines = host.start().end()
    # 6: it was complete before the last kill.
    if not lines or (lines[-1][0] != "done" and lines[-1][:2] != ["error", "6"]):
        failures.append(f"it ended with {lines}")
    failures += trees.differences(trees.manifest(host.root), trees.manifest(host.mount))
    return kills
