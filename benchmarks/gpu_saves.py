"""Cost of saves for a training on an accelerator: stall of a save, steps per second, load to the device.

    python -m benchmarks.gpu_saves                               on one GPU, in less than five minutes; prints JSON
    python -m benchmarks.gpu_saves --device cpu --gigabytes 0.02 smoke test; its figures mean nothing

*stall*: time of a step with a save and of the next step, with a wait for the program's stream after each,
compared with twice the median of steps without; so work that the device delays for the copy counts as well as
a host that waits. *loop*: steps per second with periodic saves, until everything is stored, compared with
none. *restore*: from the directory to a model and an optimizer on the device. Contenders are a save that the
manager takes by itself (copied beside the next step), an explicit save (the host waits for the copy),
`dcp.async_save` and `torch.save`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

_LAYERS: Final = 6
_BYTES_OF_A_WEIGHT: Final = 12
"""Bytes of a float32 weight with Adam's two moments."""
CONTENDERS: Final = ("nothing", "ciuic by itself", "ciuic when asked", "dcp.async_save", "torch.save")


class Training:
    """Training with typical work for its weights: a batch of 4096 (64 on the CPU) through square layers."""

    def __init__(self, device: str, gigabytes: float) -> None:
        torch = self.torch = _import("torch")
        torch.manual_seed(1)
        width = max(64, int((gigabytes * 1e9 / _BYTES_OF_A_WEIGHT / _LAYERS) ** 0.5) // 64 * 64)
        layers = [
            part
            for _ in range(_LAYERS)
            for part in (torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
        ]
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(4096 if device != "cpu" else 64, width, device=device)
        self._device = device

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(self.batch) ** 2).mean().backward()
        self.optimizer.step()

    def sync(self) -> None:
        """Wait for the program's own stream: a concurrent copy counts only if a step waits for it."""
        if self._device != "cpu":
            self.torch.accelerator.current_stream().synchronize()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def size_bytes(self) -> int:
        weights: int = sum(value.numel() * value.element_size() for value in self.model.state_dict().values())
        states = self.optimizer.state_dict()["state"].values()
        return weights + sum(
            int(value.numel() * value.element_size())
            for state in states
            for value in state.values()
            if hasattr(value, "numel")
        )


class Saver(NamedTuple):
    """Method of saving, as functions that the training loop calls."""

    after_step: Callable[[int], object]
    """Function to call with the number of each step, saved or not."""
    finish: Callable[[], object]
    """Function that waits until everything is stored."""
    close: Callable[[], object]


def saver_of(contender: str, training: Training, place: Path, every: int) -> Saver:
    def nothing(*_: object) -> None: ...

    if contender.startswith("ciuic"):
        from ciuic import SnapshotManager
        from ciuic.training import ManagerOptions

        by_itself = contender == "ciuic by itself"
        manager = SnapshotManager(
            place / "snapshots",
            max_snapshots=2,
            every_steps=every if by_itself else None,
            options=ManagerOptions(distributed=False),
        )
        if by_itself:
            manager.register(model=training.model, optimizer=training.optimizer)
            return Saver(nothing, lambda: manager.wait(), lambda: _close(manager))
        manager.framework.set_objects({"model": training.model, "optimizer": training.optimizer})

        def request(number: int) -> None:
            if number % every == 0:
                manager.save_snapshot(step=number)

        return Saver(request, lambda: manager.wait(), lambda: _close(manager))
    if contender == "dcp.async_save":
        dcp = _import("torch.distributed.checkpoint")
        pending: list[Any] = []

        def finish() -> None:
            while pending:
                pending.pop().result()

        def save_async(number: int) -> None:
            if number % every == 0:
                finish()
                target = str(place / f"dcp-{number // every % 2}")
                pending.append(dcp.async_save(training.state(), checkpoint_id=target))

        return Saver(save_async, finish, nothing)
    if contender == "torch.save":

        def save(number: int) -> None:
            if number % every == 0:
                path = place / f"{number // every % 2}.pt"
                training.torch.save(training.state(), f"{path}.tmp")
                with open(f"{path}.tmp", "rb") as file:
                    os.fsync(file.fileno())
                os.replace(f"{path}.tmp", path)

        return Saver(save, nothing, nothing)
    return Saver(nothing, nothing, nothing)


def _close(manager: Any) -> None:
    stats = manager.stats
    print(f"  {stats.saved} saved, {stats.skipped} skipped, {stats.failed} failed", file=sys.stderr)
    pinned = [
        slot.arena.pinned for slot in manager._coordinator.pipeline.client.slots if slot.arena is not None
    ]
    print(f"  page-locked: {pinned}", file=sys.stderr)
    manager.close()


def measure(contender: str, training: Training, place: Path, steps: int, every: int) -> dict[str, float]:
    """Measure the stall of a save alone, then the loop, after two saves that warm everything up."""
    saver = saver_of(contender, training, place, every)
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        training.sync()
        began = time.perf_counter()
        training.step()
        saver.after_step(number)
        training.sync()
        return time.perf_counter() - began

    for _ in range(2 * every):
        step()
    saver.finish()
    plain: list[float] = []
    saving: list[float] = []
    while len(saving) < 4:
        seconds = step()
        if number % every == 0:
            # A copy that the next step waits for is part of the stall.
            saving.append(seconds + step())
            saver.finish()
        else:
            plain.append(seconds)
    stalls = [max(0.0, seconds - 2 * statistics.median(plain)) for seconds in saving]
    training.sync()
    began = time.perf_counter()
    for _ in range(steps):
        number += 1
        training.step()
        saver.after_step(number)
    training.sync()
    stepped = time.perf_counter()
    saver.finish()
    ended = time.perf_counter()
    saver.close()
    return {
        "stall_median_s": statistics.median(stalls),
        "stall_max_s": max(stalls),
        "step_s": statistics.median(plain),
        "steps_per_second": steps / (stepped - began),
        "steps_per_second_until_stored": steps / (ended - began),
    }


def restore(contender: str, training: Training, place: Path, device: str) -> float:
    """Return the seconds of a load, from a warm page cache."""
    torch = training.torch
    began = time.perf_counter()
    if contender == "ciuic":
        from ciuic import SnapshotManager
        from ciuic.training import ManagerOptions

        with SnapshotManager(place / "snapshots", options=ManagerOptions(distributed=False)) as manager:
            manager.register(model=training.model, optimizer=training.optimizer)
            began = time.perf_counter()
            assert manager.resume() is not None
            training.sync()
            return time.perf_counter() - began
    if contender == "dcp.load":
        state = training.state()
        newest = max(place.glob("dcp-*"), key=lambda path: path.stat().st_mtime)
        _import("torch.distributed.checkpoint").load(state, checkpoint_id=str(newest))
    else:
        newest = max(place.glob("*.pt"), key=lambda path: path.stat().st_mtime)
        state = torch.load(newest, weights_only=True, map_location=device)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.sync()
    return time.perf_counter() - began


def copies(training: Training, device: str, gigabytes: float) -> dict[str, float]:
    """Return bytes per second from the device, for comparison."""
    torch = training.torch
    size = int(gigabytes * 1e9)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    found = {}
    for name, pinned in (("pageable", False), ("pinned", True)):
        try:
            target = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError:
            continue
        for _ in "ab":
            training.sync()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            training.sync()
            found[f"{name}_bytes_per_second"] = size / (time.perf_counter() - began)
    return found


def _import(name: str) -> Any:
    """Import a module that is no dependency, so that type checking does not need it."""
    return importlib.import_module(name)


def _device() -> str | None:
    torch = _import("torch")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else str(accelerator)


@contextlib.contextmanager
def _one_process(place: Path) -> Any:
    """Start the process group that dcp.async_save requires."""
    distributed = _import("torch.distributed")
    distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{place}/rendezvous")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_saves", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", help="by default the accelerator of this machine")
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of state, Adam's moments included")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where it is saved")
    options = parser.parse_args()
    device = options.device or _device()
    if device is None:
        print(json.dumps({"error": "torch finds no accelerator on this machine; nothing was measured"}))
        raise SystemExit(2)
    torch = _import("torch")
    found: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "steps": options.steps,
        "every": options.every,
    }
    if device.startswith("cuda"):
        found["name"] = torch.cuda.get_device_name(device)
    with tempfile.TemporaryDirectory(prefix="ciuic-b-", dir=options.disk) as directory:
        place = Path(directory)
        with _one_process(place):
            training = Training(device, options.gigabytes)
            training.step()
            found["state_bytes"] = training.size_bytes()
            found["copies"] = copies(training, device, min(1.0, options.gigabytes))
            for contender in CONTENDERS:
                print(contender, file=sys.stderr)
                if device.startswith("cuda"):
                    torch.cuda.reset_peak_memory_stats()
                found[contender] = measure(contender, training, place, options.steps, options.every)
                if device.startswith("cuda"):
                    found[contender]["device_peak_bytes"] = torch.cuda.max_memory_allocated()
            found["restore_s"] = {
                name: restore(name, training, place, device) for name in ("ciuic", "dcp.load", "torch.load")
            }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
