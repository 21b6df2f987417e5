"""Cost of saves for a training on the CPU, in alternation with `torch.save` and `dcp.async_save`.

    make bench-saves                                         the figures that are reported
    make bench-saves ARGS="--rounds 1 --scale 0.05"          smoke test; its figures mean nothing

Each turn is a process of its own. *stall*: time for which a save blocks the training of a 500 MB state,
compared with copying the same tensors into existing memory. *loop*: one training that continues in
alternation with a save every 20 steps, including the time after the last step until everything is stored, and
without saves. *commit*: from a staged 1 GB of noise to the durable snapshot, compared with one file written
from the same memory and synced. *durable*: from the call of a save of 500 MB to the durable snapshot, with
codecs and without, compared with `dcp.async_save`. *resume*: loading and checking the newest state, compared
with `torch.load`. *small values*: time for which a save of 500,000 small dicts blocks the training.
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
"""Steps of one turn: with four saves, including the time after the last of them."""
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
    """Row of the table: the comparison and its limit."""

    name: str
    work: str
    contender: str
    against: str
    bar: str
    met: Callable[[float], bool] | None


ROWS: Final = (
    Row("stall of a save, p99", "stall p99", "ciuic", "copy, median", "≤ 1.1 of copying", lambda ratio: ratio <= 1.1),
    Row("stall of a save, median", "stall", "ciuic", "copy", "", None),
    Row("stall of the first save", "stall first", "ciuic", "copy, median", "", None),
    *(
        Row("100 steps with a save every 20", "loop", name, "nothing", "≤ 1.01 of none" if name == "ciuic" else "",
            (lambda ratio: ratio <= 1.01) if name == "ciuic" else None)
        for name in LOOPS[1:]
    ),
    Row("commit of 1 GB", "commit", "ciuic", "write and fsync", "≤ 1 / 0.85 of writing", lambda ratio: ratio <= 1 / 0.85),
    Row("500 MB durable, with codecs", "durable", "ciuic", "dcp.async_save", "≤ 1.2", lambda ratio: ratio <= 1.2),
    Row("500 MB durable, without codecs", "durable", "ciuic, none", "dcp.async_save", "≤ 1.0", lambda ratio: ratio <= 1.0),
    Row("state back in memory", "resume", "ciuic", "torch.load", "≤ 1.1 of torch.load", lambda ratio: ratio <= 1.1),
    Row("the same, its processor time", "resume cpu", "ciuic", "torch.load", "", None),
    Row("500,000 small dicts", "small values", "ciuic", "one second", "≤ 1 s", lambda ratio: ratio <= 1.0),
)  # fmt: skip


# -- the works, each measured in a process of its own


def stall(place: Path, contender: str, scale: float) -> list[Turn]:
    """Measure saves of one state, each after a copy of it."""
    torch = _torch()

    from ciuic import SnapshotManager

    del contender
    pieces = 125
    state = {f"layer.{at}": torch.randn(int(_STATE_BYTES * scale) // 4 // pieces) for at in range(pieces)}
    copy_buffers = {name: torch.empty_like(value) for name, value in state.items()}
    copies, stalls = [], []
    with SnapshotManager(place / "snapshots", max_snapshots=2) as manager:
        manager.register(model=_State(state))
        for number in range(_STALLS + 4):
            for name in list(state)[number % 5 :: 5]:
                state[name].add_(1)
            began = time.perf_counter()
            for name, value in state.items():
                copy_buffers[name].copy_(value)
            copied = time.perf_counter()
            manager.save_snapshot(epoch=number)
            saved = time.perf_counter()
            manager.wait()
            if not number:
                first = saved - copied
            if number >= 4:  # both arenas exist and all caches are warm
                copies.append(copied - began)
                stalls.append(saved - copied)
    return [
        Turn("stall", "ciuic", statistics.median(stalls)),
        Turn("stall", "copy", statistics.median(copies)),
        Turn("stall p99", "ciuic", _p99(stalls)),
        Turn("stall p99", "copy", _p99(copies)),
        Turn("stall p99", "copy, median", statistics.median(copies)),
        Turn("stall first", "ciuic", first),
        Turn("stall first", "copy, median", statistics.median(copies)),
    ]


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _torch() -> Any:
    """Import a module that is no dependency, so that type checking does not need it."""
    return importlib.import_module("torch")


class _State:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def loop(place: Path, contender: str, scale: float) -> list[Turn]:
    """Run one training that saves with each contender in turn, repeatedly: only the method of saving differs.

    Before each turn the disk is synced, and background work after a save gets some seconds that are not
    counted.
    """
    torch = _torch()

    del contender
    torch.manual_seed(1)
    # A processor is left for whatever stores: the training of a GPU does not take all of them either.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
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
    savers = {}
    for name in LOOPS:
        (place / name).mkdir()
        save, finish = savers[name] = _saver(name, place / name, model, optimizer)
        save(0)
        finish()
    turns = []
    for number in range(_LOOP_ROUNDS):
        for name in LOOPS[number % len(LOOPS) :] + LOOPS[: number % len(LOOPS)]:
            os.sync()
            time.sleep(_REST_SECONDS)
            save, finish = savers[name]
            began = time.perf_counter()
            for at in range(1, _STEPS + 1):
                step()
                if at % _SAVE_EVERY == 0 and at < _STEPS:
                    save(at)
            finish()
            turns.append(Turn("loop", name, time.perf_counter() - began))
    return turns


def _saver(
    contender: str,
    place: Path,
    model: Any,
    optimizer: Any,
    state: Callable[[], dict[str, Any]] | None = None,
) -> tuple[Callable[[int], None], Callable[[], None]]:
    torch = _torch()
    state = state or (lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def nothing(*_: object) -> None: ...

    if contender == "ciuic":
        from ciuic import SnapshotManager

        manager = SnapshotManager(place / "snapshots", max_snapshots=2)
        manager.register(model=model, optimizer=optimizer)
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
        pending: list[Any] = []

        def finish() -> None:
            while pending:
                pending.pop().result()

        def save_async(number: int) -> None:
            finish()
            pending.append(
                dcp.async_save(state(), checkpoint_id=str(place / f"dcp-{number // _SAVE_EVERY % 2}"))
            )

        return save_async, finish
    return nothing, nothing


def commit(place: Path, contender: str, scale: float) -> list[Turn]:
    """Write 1 GB of noise to the disk."""
    torch = _torch()

    size = int(_COMMIT_BYTES * scale)
    noise = torch.randint(0, 255, (size,), dtype=torch.uint8)
    if contender == "ciuic":
        from ciuic import SnapshotManager

        with SnapshotManager(place / "snapshots") as manager:
            manager.register(model=_State({"noise": noise}))
            manager.save_snapshot(wait=True)
            return [Turn("commit", contender, manager.stats.last_write_seconds)]
    began = time.perf_counter()
    with open(place / "plain", "wb", buffering=0) as file:
        view = memoryview(noise.numpy())
        for at in range(0, size, 8 << 20):
            file.write(view[at : at + (8 << 20)])
        os.fsync(file.fileno())
    return [Turn("commit", contender, time.perf_counter() - began)]


def durable(place: Path, contender: str, scale: float) -> list[Turn]:
    """Measure the third save of a state that changes a little from save to save, on an otherwise idle machine."""
    torch = _torch()

    state = {f"layer.{at}": torch.randn(int(_STATE_BYTES * scale) // 4 // 50) for at in range(50)}
    seconds = 0.0
    finish: Callable[[], object]
    if contender == "dcp.async_save":
        save, finish = _saver(contender, place, None, None, lambda: {"model": state})
    else:
        from ciuic import SnapshotManager

        manager = SnapshotManager(
            place / "snapshots", max_snapshots=2, compression="none" if contender.endswith("none") else "auto"
        )
        manager.register(model=_State(state))

        def save(number: int) -> None:
            manager.save_snapshot(epoch=number)

        finish = manager.wait
    for number in range(3):
        for value in state.values():
            value.add_(torch.randn_like(value), alpha=1e-3)
        os.sync()
        time.sleep(_REST_SECONDS)
        began = time.perf_counter()
        save(_SAVE_EVERY * number)
        finish()
        seconds = time.perf_counter() - began
    return [Turn("durable", contender, seconds)]


def resume(place: Path, contender: str, scale: float) -> list[Turn]:
    """Save a state twice, then measure one load of it, with a warm page cache for both contenders."""
    torch = _torch()

    state = {f"layer.{at}": torch.randn(int(_STATE_BYTES * scale) // 4 // 50) for at in range(50)}
    if contender == "ciuic":
        from ciuic import SnapshotManager

        with SnapshotManager(place / "snapshots") as manager:
            manager.register(model=_State(state))
            for _ in range(2):
                for value in state.values():
                    value.add_(torch.randn_like(value), alpha=1e-3)
                manager.save_snapshot(wait=True)
            return _timed(contender, lambda: manager.load_latest_snapshot())
    torch.save(state, place / "state.pt")
    return _timed(contender, lambda: torch.load(place / "state.pt", weights_only=True))


def _timed(contender: str, load: Callable[[], object]) -> list[Turn]:
    began, used = time.perf_counter(), time.process_time()
    assert load() is not None
    return [
        Turn("resume", contender, time.perf_counter() - began),
        Turn("resume cpu", contender, time.process_time() - used),
    ]


def small_values(place: Path, contender: str, scale: float) -> list[Turn]:
    """Measure a save of many small dicts, as a table of metrics or a replay buffer has them."""
    from ciuic import SnapshotManager

    rows = [{"id": at, "loss": at * 0.5, "tag": "x"} for at in range(int(500_000 * scale))]
    stalls = []
    with SnapshotManager(place / "snapshots") as manager:
        for number in range(3):
            began = time.perf_counter()
            manager.save_snapshot(rows=rows, epoch=number)
            stalls.append(time.perf_counter() - began)
            manager.wait()
    return [
        Turn("small values", contender, statistics.median(stalls)),
        Turn("small values", "one second", 1.0),
    ]


WORKS: Final[dict[str, tuple[Callable[[Path, str, float], list[Turn]], tuple[str, ...]]]] = {
    "stall": (stall, ("ciuic",)),
    "loop": (loop, ("by turns",)),
    "commit": (commit, ("ciuic", "write and fsync")),
    "durable": (durable, ("ciuic", "ciuic, none", "dcp.async_save")),
    "resume": (resume, ("ciuic", "torch.load")),
    "small values": (small_values, ("ciuic",)),
}


# -- the session


def turn(work: str, contender: str, disk: Path, scale: float) -> list[Turn]:
    """Run in a process and a directory of its own, on an idle disk."""
    os.sync()
    with tempfile.TemporaryDirectory(prefix="ciuic-b-", dir=disk) as place:
        command = [sys.executable, "-m", "benchmarks.saves", "--scale", str(scale), "--disk", place]
        completed = subprocess.run(
            [*command, "--turn", work, contender], stdout=subprocess.PIPE, text=True, check=True, timeout=600
        )
    return [Turn(*values) for values in json.loads(completed.stdout.splitlines()[-1])]


def table(turns: list[Turn]) -> str:
    """Return the medians of the rounds and their ratio."""
    lines = [
        "| work | contender | median s | min … max | of | ratio | bar |",
        "| --- | --- | ---: | --- | --- | ---: | --- |",
    ]
    for row in ROWS:
        own, reference = (
            [turn.seconds for turn in turns if (turn.work, turn.contender) == (row.work, contender)]
            for contender in (row.contender, row.against)
        )
        if not own or not reference:
            continue
        ratio = statistics.median(own) / statistics.median(reference)
        verdict = "" if row.met is None else f"{row.bar}: {'met' if row.met(ratio) else '**missed**'}"
        lines.append(
            f"| {row.name} | {row.contender} | {statistics.median(own):.3f} | {min(own):.3f} … {max(own):.3f} "
            f"| {row.against} ({statistics.median(reference):.3f}) | {ratio:.3f} | {verdict} |"
        )
    loop_seconds = {
        name: statistics.median(t.seconds for t in turns if (t.work, t.contender) == ("loop", name))
        for name in LOOPS
        if any((t.work, t.contender) == ("loop", name) for t in turns)
    }
    if len(loop_seconds) == len(LOOPS):
        lost = {name: seconds - loop_seconds["nothing"] for name, seconds in loop_seconds.items()}
        words = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in lost.items() if name != "nothing")
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
        json.dumps([turn._asdict() for turn in turns], indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
