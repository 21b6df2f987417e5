"""Checkpoints of Lightning as files that torch and Lightning open without ciuic.

While a training runs, the file at a checkpoint's path is a pointer to its snapshot. At the end of `fit` the
chosen ones are replaced by the checkpoint itself: a file of torch.save, with the pointer as an extra member of
the archive. Guarantees: at any moment the path has the whole pointer or the whole checkpoint; a checkpoint
that cannot be written stays a pointer, which is logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ciuic.integrations.lightning_pointer import Pointer, encode_pointer, load_pointed, read_pointer
from ciuic.training.convert.destination import remove_leftovers
from ciuic.training.convert.export_state import lightning_checkpoint
from ciuic.training.convert.exported_files import write_torch
from ciuic.training.logs import quietly

log = logging.getLogger("ciuic")

_KINDS: Final = ("best", "last")


def parse_kinds(materialize: str) -> frozenset[str]:
    """Return which checkpoints are to become files.

    Args:
        materialize: ``all``, ``none``, or some of ``best`` and ``last``, separated by commas.

    Raises:
        ValueError: The option is anything else.
    """
    if materialize in ("all", "none"):
        return frozenset({"all", *_KINDS} if materialize == "all" else ())
    kinds = frozenset(one.strip() for one in materialize.split(","))
    if not kinds <= set(_KINDS):
        raise ValueError(f'materialize must be "all", "none" or of {", ".join(_KINDS)}, got {materialize!r}')
    return kinds


class CheckpointFiles:
    """Checkpoints that a plugin has saved, and those of them that become files."""

    def __init__(self, save_dir: Path, materialize: str) -> None:
        """Begin with none; raises as `parse_kinds`.

        Args:
            save_dir: Repository of the plugin's manager.
            materialize: Which checkpoints are to become files.
        """
        self._save_dir = save_dir
        self._kinds = parse_kinds(materialize)
        self._written: list[str] = []

    def wrote(self, path: str | os.PathLike[str]) -> None:
        """Note a checkpoint that was saved; the newest is the last one."""
        self.removed(path)
        self._written.append(os.path.abspath(path))

    def removed(self, path: str | os.PathLike[str]) -> None:
        """Forget a checkpoint that Lightning has removed."""
        self._written = [one for one in self._written if one != os.path.abspath(path)]

    def write_chosen(self, trainer: Any) -> None:
        """Write the chosen checkpoints that are still pointers, each durably, and log what fails.

        Args:
            trainer: Lightning's Trainer, whose callbacks know the best and the last one; None: unknown.
        """
        # A symbolic link (save_last="link") keeps leading to its checkpoint.
        for path in dict.fromkeys(os.path.realpath(one) for one in self._chosen(trainer)):
            pointer = read_pointer(path)
            if pointer is not None and not pointer.is_whole:
                with quietly(
                    f"{path} stays a pointer to its snapshot, which `ciuic export` can write as a file"
                ):
                    write_checkpoint(path, pointer, self._save_dir)

    def _chosen(self, trainer: Any) -> Iterator[str]:
        for callback in getattr(trainer, "checkpoint_callbacks", ()):
            if "best" in self._kinds:
                yield str(getattr(callback, "best_model_path", ""))
            if "last" in self._kinds:
                yield str(getattr(callback, "last_model_path", ""))
            if "all" in self._kinds:
                yield from map(str, getattr(callback, "best_k_models", ()))
        if "all" in self._kinds:
            yield from self._written
        elif "last" in self._kinds:
            # Without save_last no callback names it.
            yield from self._written[-1:]


def write_checkpoint(path: str, pointer: Pointer, save_dir: Path) -> int:
    """Replace a pointer by the checkpoint, atomically and durably; return its size.

    Args:
        path: The pointer's file, no symbolic link.
        pointer: Its content.
        save_dir: Repository to look in where the one that the pointer names is not there.

    Raises:
        NotFound: The snapshot is not there.
        Damaged: It is not as it was saved.
        OSError: The file cannot be written; the pointer stays.
    """
    state = load_pointed(path, pointer, save_dir)
    checkpoint = lightning_checkpoint(state["checkpoint_state_dict"], state["of_rank_state_dict"])
    # Of a process that was killed while it wrote this checkpoint.
    remove_leftovers(Path(path))
    return write_torch(Path(path), checkpoint, overwrite=True, record=encode_pointer(pointer))
