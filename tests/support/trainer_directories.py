"""Directories as trainers leave them, whole and half-written, with what each save was meant to be.

A save is the list of its files in the order in which the trainer writes them; one that was killed has a beginning of the list, its last
file cut. What lies beside the checkpoints is made by other programs: pointers called ``latest``, caches, notes.
"""

from __future__ import annotations

import io
import json
import random
import stat
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from support.checkpoint_files import FORMATS, plain_safetensors
from support.cli_repository import FIRST_NS, SECOND_NS

from ciuic.types import Entry
from ciuic.verdicts.formats.tensor_bundle import crc32c

Files = list[tuple[str, bytes]]


def _archive(values: dict[str, Any]) -> bytes:
    into = io.BytesIO()
    np.savez(into, **values)
    return into.getvalue()


WHOLE = FORMATS["safetensors"].make(random.Random(1))
TORCH = FORMATS["npz"].make(random.Random(1))
"""Stands for the zip archive that `torch.save` writes."""
PICKLE = FORMATS["pickle"].make(random.Random(1))
NOT_FINITE = {
    WHOLE: plain_safetensors({"w": np.array([1, np.nan], "f4")}),
    TORCH: _archive({"w": np.array([np.inf, 1, np.nan], "f2")}),
}
"""The same with numbers that are not finite."""
UNKNOWN = b"\x93\x17 numbers of a program" * 40
STEP_NS = 100 * SECOND_NS


class Save(NamedTuple):
    """One save of a trainer."""

    path: str
    """Path that names the checkpoint."""
    files: Files
    """Files in the order in which they are written."""
    renames: tuple[str, str] = ("", "")
    """Directory that is renamed when the save is complete, and its name before."""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links, made first, with where they lead."""
    pointer: tuple[str, bytes] = ("", b"")
    """File that is replaced at the end of each save."""


def metadata(path: bytes, offset: int, length: int) -> bytes:
    """Return a pickle with one place in it, as torch writes it."""

    def text(value: bytes) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value + b"\x94"

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little")

    state = (
        text(b"relative_path")
        + text(path)
        + text(b"offset")
        + number(offset)
        + text(b"length")
        + number(length)
    )
    return b"\x80\x04}\x94(" + state + b"u."


def orbax() -> dict[str, bytes]:
    """Return the files of an Orbax checkpoint, in the order in which they are written."""
    body = bytes.fromhex("0cdb3a2a") + (40).to_bytes(8, "little") + bytes(24)
    return {
        "default/d/0a1b": b"data",
        "default/manifest.ocdbt": body + crc32c(body).to_bytes(4, "little"),
        "_CHECKPOINT_METADATA": json.dumps({"commit_timestamp_nsecs": 2}).encode(),
    }


def _sharded(count: int = 2) -> Files:
    names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    index = json.dumps({"metadata": {}, "weight_map": {f"w{name}": name for name in names}}).encode()
    return [*((name, WHOLE) for name in names), ("model.safetensors.index.json", index)]


def _dcp(ranks: int = 2) -> Files:
    data = bytes(range(1, 251))
    return [
        *((f"__{rank}_0.distcp", data) for rank in range(ranks)),
        (".metadata", metadata(b"__0_0.distcp", 100, 150)),
    ]


_HF_STATE: Files = [
    ("training_args.bin", TORCH),
    ("optimizer.pt", TORCH),
    ("scheduler.pt", TORCH),
    ("rng_state.pth", TORCH),
    ("trainer_state.json", b"{}"),
]
_ZERO: Files = [
    ("mp_rank_00_model_states.pt", TORCH),
    *((f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", TORCH) for rank in range(2)),
]


def _in(directory: str, files: Files) -> Files:
    return [(f"{directory}/{name}", content) for name, content in files]


def _of_directory(name: str, files: Callable[[int], Files], **more: Any) -> Callable[[int], Save]:
    def save(step: int) -> Save:
        path = name.format(step)
        return Save(path, _in(path, files(step)), **more)

    return save


def _hub(step: int) -> Save:
    files = _sharded()
    return Save(
        f"hub/snapshots/{step}/model.safetensors.index.json",
        [(f"hub/blobs/{step}{number}", content) for number, (_, content) in enumerate(files)],
        links=tuple(
            (f"hub/snapshots/{step}/{name}", f"../../blobs/{step}{number}")
            for number, (name, _) in enumerate(files)
        ),
    )


TRAINERS: dict[str, Callable[[int], Save]] = {
    "torch": lambda step: Save(f"step-{step}.pt", [(f"step-{step}.pt", TORCH)]),
    "safetensors": lambda step: Save(f"model_{step}.safetensors", [(f"model_{step}.safetensors", WHOLE)]),
    "loop": lambda step: Save(
        f"model_{step:06}.pt",
        [
            (f"model_{step:06}.pt", TORCH),
            (f"optim_{step:06}_rank0.pt", TORCH),
            (f"optim_{step:06}_rank1.pt", TORCH),
        ],
    ),
    "lightning": lambda step: Save(f"epoch=0-step={step}.ckpt", [(f"epoch=0-step={step}.ckpt", TORCH)]),
    "keras": lambda step: Save(f"ck-{step}.keras", [(f"ck-{step}.keras", TORCH)]),
    "transformers": _of_directory("checkpoint-{}", lambda _: [("model.safetensors", WHOLE), *_HF_STATE]),
    "transformers, sharded": _of_directory("checkpoint-{}", lambda _: [*_sharded(), *_HF_STATE]),
    "transformers, FSDP": _of_directory(
        "checkpoint-{}",
        lambda _: [*_in("pytorch_model_fsdp_0", _dcp()), *_in("optimizer_0", _dcp()), *_HF_STATE[2:]],
    ),
    "transformers, DeepSpeed": _of_directory(
        "checkpoint-{}",
        lambda step: [
            *_in(f"global_step{step}", _ZERO),
            ("latest", f"global_step{step}".encode()),
            *_HF_STATE[2:],
        ],
    ),
    "deepspeed": lambda step: Save(
        f"global_step{step}",
        _in(f"global_step{step}", _ZERO),
        pointer=("latest", f"global_step{step}".encode()),
    ),
    "megatron": lambda step: Save(
        f"iter_{step:07}",
        [(f"iter_{step:07}/mp_rank_0{rank}/model_optim_rng.pt", TORCH) for rank in range(2)],
        pointer=("latest_checkpointed_iteration.txt", str(step).encode()),
    ),
    "dcp": _of_directory("step-{}", lambda _: [*_dcp(), ("train_state.pt", TORCH)][::-1]),
    "orbax": lambda step: Save(
        f"{step}",
        _in(f"{step}", list(orbax().items())),
        renames=(f"{step}", f"{step}.orbax-checkpoint-tmp-7"),
    ),
    "hub": _hub,
}


def link(target: str) -> Entry:
    """Return a symbolic link."""
    return Entry(
        name=b"", mode=stat.S_IFLNK | 0o777, target=target.encode(), mtime_ns=FIRST_NS + 9000 * SECOND_NS
    )


LATEST: dict[str, Callable[[Save], Any]] = {
    "link": lambda save: link(save.path),
    "name": lambda save: save.path.encode(),
    "step": lambda save: b"300",
    "directory": lambda save: {b"notes.txt": b"x"},
    "dangling": lambda save: link("absent"),
    "outside": lambda save: link("/absent/elsewhere"),
    "circle": lambda save: link("latest"),
    "empty": lambda save: b"",
}
"""Files that programs other than DeepSpeed call ``latest``."""

BESIDE: dict[str, bytes] = {
    "notes.bin": UNKNOWN,
    "cache.npy": UNKNOWN,
    "cache.pkl": UNKNOWN,
    "docs.index.json": b'{"files": ["a"]}',
    ".metadata": b'{"kind": "of another program"}',
    "shard-00001-of-00010.bin": UNKNOWN,
}


class Run(NamedTuple):
    """A directory of a run, as it was at an instant."""

    tree: dict[bytes, Any]
    newest: Save
    is_whole: bool
    """False if the newest save did not end."""
    whole: frozenset[str]
    """Paths of the saves that ended, and that no rotation has begun to remove."""


def run(
    trainer: str,
    steps: list[int],
    *,
    written: int = -1,
    cut: float = 1.0,
    latest: str = "",
    beside: tuple[str, ...] = (),
    within: bool = False,
    diverged: bool = False,
) -> Run:
    """Return the directory of a run.

    Args:
        trainer: Name in `TRAINERS`.
        steps: Steps of the saves, ascending.
        written: Number of files that the last save has; -1 for all, and it has ended.
        cut: Part of the last of them that was written, 1.0 for all.
        latest: Name in `LATEST`; empty for none.
        beside: Names in `BESIDE`, newer than all checkpoints.
        within: Whether these lie in the directory of the last save, too.
        diverged: Whether the numbers of the last save are not finite.
    """
    tree: dict[bytes, Any] = {}
    saves = [TRAINERS[trainer](step) for step in steps]
    last = saves[-1]
    ends_by_itself = not (last.pointer[0] or last.renames[0])
    is_whole = written < 0 or (ends_by_itself and written >= len(last.files) and cut == 1.0)
    for number, save in enumerate(saves):
        ended = is_whole or save is not saves[-1]
        files = save.files if ended else save.files[:written]
        for at, (path, content) in enumerate(files):
            if diverged and save is last:
                content = NOT_FINITE.get(content, content)
            if not ended and at == len(files) - 1 and cut < 1.0:
                content = content[: int(len(content) * cut)]
            if not ended and save.renames[0]:
                path = path.replace(save.renames[0], save.renames[1], 1)
            _put(tree, path, (content, {"mtime_ns": FIRST_NS + number * STEP_NS + at * SECOND_NS}))
        for path, target in save.links:
            _put(tree, path, link(target))
        if ended and save.pointer[0]:
            _put(
                tree,
                save.pointer[0],
                (save.pointer[1], {"mtime_ns": FIRST_NS + number * STEP_NS + 50 * SECOND_NS}),
            )
    for name in beside:
        noise = BESIDE[name], {"mtime_ns": FIRST_NS + 9000 * SECOND_NS}
        tree.setdefault(name.encode(), noise)
        directory = tree.get(saves[-1].path.encode())
        if within and isinstance(directory, dict) and name != ".metadata":
            directory.setdefault(name.encode(), noise)
    if latest and "latest" not in {save.pointer[0] for save in saves}:
        tree[b"latest"] = LATEST[latest](last)
    if not is_whole and last.renames[0]:
        last = last._replace(path=last.renames[1])
    whole = frozenset(save.path for save in saves[: None if is_whole else -1])
    return Run(tree, last, is_whole, whole)


def _put(tree: dict[bytes, Any], path: str, what: Any) -> None:
    *above, name = path.encode().split(b"/")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[name] = what
