"""What runs in a process that is to be killed: a training, its log, and the memory it shares with the killer."""

from __future__ import annotations

import atexit
import faulthandler
import hashlib
import importlib
import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_FIELDS: Final = (
    *("step", "resumed", "staging", "staged", "staged_step", "writer", "write_microseconds"),
    *("copy_kill_step", "copy_kill_part"),
)
_FIELD_BYTES: Final = 8
COPY_PARTS: Final = 1000
"""Unit of ``copy_kill_part``: the share of a state's tensors that are copied when the kill comes."""
_STEP_SECONDS: Final = 0.02
"""Pause after each step: otherwise a snapshot of these small states takes longer than the steps between two."""


class SharedProgress:
    """Numbers of one process, in memory that it shares with the process that kills it.

    ``step``: optimizer steps of the whole run. ``resumed``: 1 + the step that it resumed from; 0 if it did not.
    ``staging`` and ``staged``: copies of the state begun and ended. ``staged_step``: step of the last one begun.
    ``writer``: id of the writer process. ``write_microseconds``: time that the writer took for its last snapshot.
    ``copy_kill_step``: the process kills itself within the first copy at this step or later (0: never).
    """

    step: int
    resumed: int
    staging: int
    staged: int
    staged_step: int
    writer: int
    write_microseconds: int
    copy_kill_step: int
    copy_kill_part: int

    def __init__(self) -> None:
        memory = memoryview(mmap.mmap(-1, len(_FIELDS) * _FIELD_BYTES)).cast("q")
        object.__setattr__(self, "_memory", memory)

    def __getattr__(self, name: str) -> int:
        if name not in _FIELDS:
            raise AttributeError(name)
        return int(self.__dict__["_memory"][_FIELDS.index(name)])

    def __setattr__(self, name: str, value: int) -> None:
        self.__dict__["_memory"][_FIELDS.index(name)] = value

    def clear(self) -> None:
        """Set every number to 0."""
        for name in _FIELDS:
            setattr(self, name, 0)


class ResumedRun:
    """A training that resumes by itself: where it saves, and what it reports."""

    def __init__(
        self, where: Path, rank: int, world: int, progress: SharedProgress, variant: str = ""
    ) -> None:
        self.save_dir, self.rank, self.world, self.variant = str(where / "snapshots"), rank, world, variant
        self._result = where / f"result-{rank}"
        self._log = os.open(where / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._progress = progress

    def report(self, key: str, values: Mapping[str, Any]) -> None:
        """Append a line to the log. A line that is reported again after a resume must have the same values.

        Args:
            key: kind and number, for example ``step 7``.
            values: numbers and strings by name.
        """
        # One write: a kill leaves the whole line or none.
        os.write(self._log, (json.dumps({"key": key, "values": plain(values)}) + "\n").encode())

    def begin(self, step: int | None) -> None:
        """Record the step that was resumed from, or None, where no manager does. Steps before are not counted."""
        self._progress.step = step or 0
        self._progress.resumed = 0 if step is None else 1 + step

    def stepped(self) -> None:
        """Count an optimizer step, where no hook of torch does."""
        _count_step(self._progress)

    def finish(self, state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Record the end of the training.

        Args:
            state: parts of the final state by name, of which digests are compared.
            values: what is reported at the end, by name.
        """
        found = {"state": {name: digest(part) for name, part in state.items()}, "values": plain(values)}
        made = self._result.with_suffix(".tmp")
        made.write_text(json.dumps(found))
        os.replace(made, self._result)


def generators() -> dict[str, Any]:
    """Return the states of the random generators of this process, as parts of a final state."""
    import numpy as np

    found: dict[str, Any] = {"random": random.getstate(), "numpy": np.random.get_state()}
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].get_rng_state()
    return {f"generator of {name}": state for name, state in found.items()}


def plain(value: Any) -> Any:
    """Return a value as JSON: numbers of any library as exact ones."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    number = float(value)
    # JSON has no NaN that equals itself.
    return number if number - number == 0 else repr(number)


def digest(value: Any) -> str:
    """Return a digest of every bit of a state: tensors, arrays, containers and plain values."""
    hasher = hashlib.sha256()
    _add(hasher, value)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    if hasattr(value, "to_local"):
        value = value.to_local()
    if hasattr(value, "detach"):
        import torch

        value = value.detach().cpu().contiguous()
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "dtype") and hasattr(value, "tobytes"):
        hasher.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            hasher.update(repr(key).encode())
            _add(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"[{len(value)}".encode())
        for one in value:
            _add(hasher, one)
    else:
        hasher.update(repr(value).encode())


def run_child(
    case: str, variant: str, where: Path, ranks: tuple[int, int, int], progress: SharedProgress
) -> None:
    """Run a case in a process that was forked for it; never return.

    Args:
        case: module of ``cases``.
        variant: what the case is to do, where it has variants.
        where: directory of the run.
        ranks: rank, number of ranks, and port at which they meet.
        progress: numbers shared with the killer.
    """
    rank, world, port = ranks
    status = 1
    try:
        _redirect_output(where / f"output-{rank}")
        module = importlib.import_module(f"support.resumes.cases.{case}")
        _watch(progress)
        # Where a process does not end after a kill of its partner, its stacks are asked for.
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        # Python seeds `random` anew in each forked process.
        random.seed(rank)
        if world > 1:
            _meet(rank, world, port, connects=not hasattr(module, "CONNECTS_RANKS"))
        elif "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        module.train(ResumedRun(where, rank, world, progress, variant))
        status = 0
    except BaseException as error:
        # As the interpreter does for an exception that nothing catches.
        sys.last_value = error
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _count_step(progress: SharedProgress) -> None:
    progress.step += 1
    time.sleep(_STEP_SECONDS)


def _redirect_output(path: Path) -> None:
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = open(1, "w", closefd=False, buffering=1)
    sys.stderr = open(2, "w", closefd=False, buffering=1)


def _meet(rank: int, world: int, port: int, *, connects: bool) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    if connects:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=20))


def _watch(progress: SharedProgress) -> None:
    """Have the progress of the manager of this process recorded."""
    from ciuic.training.coordinator import SaveCoordinator
    from ciuic.training.format.tensors import ArrayBuffer
    from ciuic.training.save_pipeline import SavePipeline
    from ciuic.training.writer.client import WriterClient

    if "torch" in sys.modules and "keras" not in sys.modules:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def count(*_: object) -> None:
            _count_step(progress)

        register_optimizer_step_post_hook(count)
    own_resume, own_stage, own_fill = SaveCoordinator.resume_from, SavePipeline.stage, ArrayBuffer.fill
    copies_left = [-1]
    """Copies of tensors before the kill; negative: no kill."""

    def resume_from(self: SaveCoordinator, state: Any) -> None:
        own_resume(self, state)
        progress.step = state.facts.step or 0
        progress.resumed = 1 + progress.step

    def begin_copy(tensors: int) -> None:
        progress.staged_step = progress.step
        if progress.copy_kill_step and progress.step >= progress.copy_kill_step:
            copies_left[0] = tensors * progress.copy_kill_part // COPY_PARTS
        progress.staging += 1

    def end_copy(client: WriterClient) -> None:
        if client._process is not None:
            progress.writer = client._process.pid
        progress.staged += 1

    def stage(self: SavePipeline, state: Any, *args: Any, **options: Any) -> Any:
        progress.write_microseconds = int(1e6 * (self.stats.last_write_seconds or 0))
        begin_copy(sum(len(leaves) for leaves in state.leaves.values()))
        found = own_stage(self, state, *args, **options)
        end_copy(self.client)
        return found

    def fill(self: ArrayBuffer, value: Any) -> None:
        if copies_left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        copies_left[0] -= 1
        own_fill(self, value)

    SaveCoordinator.resume_from = resume_from  # type: ignore[method-assign]
    SavePipeline.stage = stage  # type: ignore[method-assign]
    ArrayBuffer.fill = fill  # type: ignore[method-assign]
    if "deepspeed" in sys.modules:
        from ciuic.training.dcp.rank_files import PartsWriter, RankFiles

        own_begin = PartsWriter.begin

        def begin(self: PartsWriter, part: RankFiles, *args: Any) -> int:
            begin_copy(len(part._to_fill))
            number = own_begin(self, part, *args)
            end_copy(self._client)
            return number

        PartsWriter.begin = begin  # type: ignore[method-assign, assignment]
