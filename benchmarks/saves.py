"""What saving a training's state costs the training, beside `torch.save` and `dcp.async_save`: by turns, on the CPU.

    make bench-saves                                         the figures that are reported
    make bench-saves ARGS="--rounds 1 --scale 0.05"          does everything work? (no figure of it means anything)

Each turn is a process of its own. *stall*: how long a save keeps the training of a 500 MB state waiting, against copying the same
tensors into memory that is there already. *loop*: one training that goes on by turns with a save every 20 steps, the time after the
last step until all is stored included, and without. *commit*: from a staged 1 GB of noise to the durable snapshot, against one
file written from the same memory and synced. *resume*: the newest state into memory, checked, against `torch.load`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

_RESULTS: Final = Path(__file__).with_name("results")
_STATE_BYTES: Final = 500_000_000
_COMMIT_BYTES: Final = 1_000_000_000
_STEPS: Final = 100
"""Between two ways of saving: with four saves, the time after the last of them included."""
_SAVE_EVERY: Final = 20
_LOOP_ROUNDS: Final = 4
_REST_SECONDS: Final = 2.0
_HIDDEN: Final = 1024
_LAYERS: Final = 4
_STALLS: Final = 100
LOOPS: Final = ("nothing", "ciuic", "torch.save", "dcp.async_save")


class Turn(NamedTuple):
    """One figure of one turn."""

    work: str
    contender: str
    seconds: float


class Row(NamedTuple):
    """Of the table: what is compared, and with what limit."""

    name: str
    work: str
    contender: str
    against: str
    bar: str
    met: Callable[[float], bool] | None


ROWS: Final = (
    Row("stall of a save, p99", "stall p99", "ciuic", "copy", "≤ 1.2 of copying", lambda ratio: ratio <= 1.2),
    Row("stall of a save, median", "stall", "ciuic", "copy", "", None),
    *(
        Row("100 steps with a save every 20", "loop", one, "nothing", "≤ 1 / 0.97 of none" if one == "ciuic" else "",
            (lambda ratio: ratio <= 1 / 0.97) if one == "ciuic" else None)
        for one in LOOPS[1:]
    ),
    Row("commit of 1 GB", "commit", "ciuic", "write and fsync", "≤ 1 / 0.85 of writing", lambda ratio: ratio <= 1 / 0.85),
    Row("state back in memory", "resume", "ciuic", "torch.load", "", None),
)  # fmt: skip


# -- what is measured, each in a process of its own


def stall(place: Path, contender: str, scale: float) -> list[Turn]:
    """Saves of one state, each after a copy of the same."""
    torch = _torch()

    from ciuic import SnapshotManager

    del contender
    pieces = 125
    state = {f"layer.{at}": torch.randn(int(_STATE_BYTES * scale) // 4 // pieces) for at in range(pieces)}
    room = {name: torch.empty_like(value) for name, value in state.items()}
    copies, stalls = [], []
    with SnapshotManager(place / "snapshots", max_snapshots=2) as manager:
        manager.take({"model": _State(state)})
        for number in range(_STALLS + 4):
            for name in list(state)[number % 5 :: 5]:
                state[name].add_(1)
            began = time.perf_counter()
            for name, value in state.items():
                room[name].copy_(value)
            copied = time.perf_counter()
            manager.save_snapshot(epoch=number)
            saved = time.perf_counter()
            manager.wait()
            if number >= 4:  # both arenas exist, and the machine has seen it all
                copies.append(copied - began)
                stalls.append(saved - copied)
    return [
        Turn("stall", "ciuic", statistics.median(stalls)),
        Turn("stall", "copy", statistics.median(copies)),
        Turn("stall p99", "ciuic", _p99(stalls)),
        Turn("stall p99", "copy", _p99(copies)),
    ]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _torch() -> Any:
    """Not a dependency: type checking must not need it."""
    return importlib.import_module("torch")


class _State:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def loop(place: Path, contender: str, scale: float) -> list[Turn]:
    """One training, which goes on for some saves in one way, then in the next, and begins again: what differs is the saving alone.

    Between two ways the disk comes to rest, and what follows a save in the background has some seconds for that which are not counted.
    """
    torch = _torch()

    del contender
    torch.manual_seed(1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    hidden = max(64, int(_HIDDEN * scale**0.5))
    layers = [layer for _ in range(_LAYERS) for layer in (torch.nn.Linear(hidden, hidden), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(1024, hidden)

    def step() -> None:
        optimizer.zero_grad()
        (model(batch) ** 2).mean().backward()
        optimizer.step()

    step()
    ways = {}
    for way in LOOPS:
        (place / way).mkdir()
        save, finish = ways[way] = _saver(way, place / way, model, optimizer)
        save(0)
        finish()
    turns = []
    for number in range(_LOOP_ROUNDS):
        for way in LOOPS[number % len(LOOPS) :] + LOOPS[: number % len(LOOPS)]:
            os.sync()
            time.sleep(_REST_SECONDS)
            save, finish = ways[way]
            began = time.perf_counter()
            for at in range(1, _STEPS + 1):
                step()
                if at % _SAVE_EVERY == 0 and at < _STEPS:
                    save(at)
            finish()
            turns.append(Turn("loop", way, time.perf_counter() - began))
    return turns


def _saver(
    contender: str, place: Path, model: Any, optimizer: Any
) -> tuple[Callable[[int], None], Callable[[], None]]:
    torch = _torch()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def nothing(*_: object) -> None: ...

    if contender == "ciuic":
        from ciuic import SnapshotManager

        manager = SnapshotManager(place / "snapshots", max_snapshots=2)
        manager.take({"model": model, "optimizer": optimizer})
        return lambda number: manager.save_snapshot(epoch=number) and None, manager.wait  # type: ignore[return-value]
    if contender == "torch.save":

        def save(number: int) -> None:
            path = place / f"{number // _SAVE_EVERY % 2}.pt"
            torch.save(state(), f"{path}.tmp")
            with open(f"{path}.tmp", "rb") as file:
                os.fsync(file.fileno())
            os.replace(f"{path}.tmp", path)

        return save, nothing
    if contender == "dcp.async_save":
        distributed: Any = importlib.import_module("torch.distributed")
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{place}/rendezvous")
        under_way: list[Any] = []

        def finish() -> None:
            while under_way:
                under_way.pop().result()

        def save_behind(number: int) -> None:
            finish()
            under_way.append(
                dcp.async_save(state(), checkpoint_id=str(place / f"dcp-{number // _SAVE_EVERY % 2}"))
            )

        return save_behind, finish
    return nothing, nothing


def commit(place: Path, contender: str, scale: float) -> list[Turn]:
    """1 GB of noise to the disk."""
    torch = _torch()

    size = int(_COMMIT_BYTES * scale)
    noise = torch.randint(0, 255, (size,), dtype=torch.uint8)
    if contender == "ciuic":
        from ciuic import SnapshotManager

        with SnapshotManager(place / "snapshots") as manager:
            manager.take({"model": _State({"noise": noise})})
            manager.save_snapshot(wait=True)
            return [Turn("commit", contender, manager.stats.last_write_seconds)]
    began = time.perf_counter()
    with open(place / "plain", "wb", buffering=0) as file:
        view = memoryview(noise.numpy())
        for at in range(0, size, 8 << 20):
            file.write(view[at : at + (8 << 20)])
        os.fsync(file.fileno())
    return [Turn("commit", contender, time.perf_counter() - began)]


def resume(place: Path, contender: str, scale: float) -> list[Turn]:
    """Written by an earlier turn here, page cache warm for both."""
    torch = _torch()

    state = {f"layer.{at}": torch.randn(int(_STATE_BYTES * scale) // 4 // 50) for at in range(50)}
    if contender == "ciuic":
        from ciuic import SnapshotManager

        with SnapshotManager(place / "snapshots") as manager:
            manager.take({"model": _State(state)})
            manager.save_snapshot(wait=True)
            began = time.perf_counter()
            assert manager.load_latest_snapshot() is not None
            return [Turn("resume", contender, time.perf_counter() - began)]
    torch.save(state, place / "state.pt")
    began = time.perf_counter()
    torch.load(place / "state.pt", weights_only=True)
    return [Turn("resume", contender, time.perf_counter() - began)]


WORKS: Final[dict[str, tuple[Callable[[Path, str, float], list[Turn]], tuple[str, ...]]]] = {
    "stall": (stall, ("ciuic",)),
    "loop": (loop, ("by turns",)),
    "commit": (commit, ("ciuic", "write and fsync")),
    "resume": (resume, ("ciuic", "torch.load")),
}


# -- the session


def turn(work: str, contender: str, disk: Path, scale: float) -> list[Turn]:
    """In a process and a directory of its own, on a disk that is at rest."""
    os.sync()
    with tempfile.TemporaryDirectory(prefix="ciuic-b-", dir=disk) as place:
        command = [sys.executable, "-m", "benchmarks.saves", "--scale", str(scale), "--disk", place]
        done = subprocess.run(
            [*command, "--turn", work, contender], stdout=subprocess.PIPE, text=True, check=True, timeout=600
        )
    return [Turn(*one) for one in json.loads(done.stdout.splitlines()[-1])]


def table(turns: list[Turn]) -> str:
    """Medians of the rounds and their ratio."""
    lines = [
        "| work | contender | median s | min … max | of | ratio | bar |",
        "| --- | --- | ---: | --- | --- | ---: | --- |",
    ]
    for row in ROWS:
        mine, other = (
            [one.seconds for one in turns if (one.work, one.contender) == (row.work, who)]
            for who in (row.contender, row.against)
        )
        if not mine or not other:
            continue
        ratio = statistics.median(mine) / statistics.median(other)
        verdict = "" if row.met is None else f"{row.bar}: {'met' if row.met(ratio) else '**missed**'}"
        lines.append(
            f"| {row.name} | {row.contender} | {statistics.median(mine):.3f} | {min(mine):.3f} … {max(mine):.3f} "
            f"| {row.against} ({statistics.median(other):.3f}) | {ratio:.3f} | {verdict} |"
        )
    losses = {
        one: statistics.median(t.seconds for t in turns if (t.work, t.contender) == ("loop", one))
        for one in LOOPS
        if any((t.work, t.contender) == ("loop", one) for t in turns)
    }
    if len(losses) == len(LOOPS):
        lost = {one: seconds - losses["nothing"] for one, seconds in losses.items()}
        words = ", ".join(f"{one} {seconds:.3f} s" for one, seconds in lost.items() if one != "nothing")
        lines.append(f"\nLost to saving, medians: {words} (bar: a third of either at most).")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.saves", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where it is saved")
    parser.add_argument("--name", default="latest-saves", help="of the results' files")
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        work, contender = options.turn
        print(json.dumps(WORKS[work][0](options.disk, contender, options.scale)))
        return
    turns: list[Turn] = []
    for number in range(options.rounds):
        for work in options.works:
            contenders = WORKS[work][1]
            for contender in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
                turns += turn(work, contender, options.disk, options.scale)
                print(turns[-1], file=sys.stderr)
    text = table(turns)
    print(text)
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"{options.name}.md").write_text(text + "\n")
    (_RESULTS / f"{options.name}.json").write_text(
        json.dumps([one._asdict() for one in turns], indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
