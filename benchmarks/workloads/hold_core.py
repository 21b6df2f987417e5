"""The hold of a cut in the overlay core alone: six threads write through it, and what is dirty is marked directly."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Sequence

from ciuic.fuse_layer.core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.node import Node

_PIECE_BYTES = 4096
_BETWEEN_CUTS_SECONDS = 0.01
_SWITCH_SECONDS = 0.0005
"""As in the worker."""


def holds(
    directory: str, *, dirty_files: int, dirty_bytes: int, cuts: int, writers: Sequence[str]
) -> list[int]:
    """Microseconds of each hold. ``directory`` has a tree of the files to mark, ``large``, and a file for each writer."""
    backing_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    core = OverlayCore(backing_fd, session="0" * 32)
    switch = sys.getswitchinterval()
    try:
        nodes = _know_tree(core, f"{directory}/tree")
        large = _node(core, core.lookup(ROOT_ID, b"large").node)
        gc.freeze()  # as in the worker: going through a million nodes is no part of a hold
        gc.disable()
        sys.setswitchinterval(_SWITCH_SECONDS)
        return _cut_under_load(core, nodes[:dirty_files], large, dirty_bytes, cuts, writers)
    finally:
        sys.setswitchinterval(switch)
        gc.enable()
        gc.unfreeze()
        core.close()
        os.close(backing_fd)


def _know_tree(core: OverlayCore, tree: str) -> list[Node]:
    """Looks every file of the tree up, as the kernel does."""
    top = core.lookup(ROOT_ID, b"tree").node
    found = []
    for name in os.listdir(os.fsencode(tree)):
        folder = core.lookup(top, name).node
        found += [
            _node(core, core.lookup(folder, below).node)
            for below in os.listdir(os.fsencode(tree) + b"/" + name)
        ]
    return found


def _node(core: OverlayCore, number: int) -> Node:
    return core._state.nodes.get(number)


def _cut_under_load(
    core: OverlayCore, nodes: Sequence[Node], large: Node, dirty_bytes: int, cuts: int, writers: Sequence[str]
) -> list[int]:
    over = threading.Event()
    threads = [threading.Thread(target=_write_until, args=(core, name, over)) for name in writers]
    for thread in threads:
        thread.start()
    found = []
    try:
        for _ in range(cuts):
            for node in nodes:
                core._state.tracker.mark_attrs(node)
            core._state.tracker.mark_blocks(large, 0, dirty_bytes)
            time.sleep(_BETWEEN_CUTS_SECONDS)
            cut = core.cut()
            found.append(cut.hold_us)
            core.committed(cut.epoch)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return found


def _write_until(core: OverlayCore, name: str, over: threading.Event) -> None:
    attributes = core.lookup(ROOT_ID, name.encode())
    handle = core.open(attributes.node, os.O_RDWR)
    pieces = attributes.st.st_size // _PIECE_BYTES
    chosen, piece = random.Random(name), b"w" * _PIECE_BYTES
    while not over.is_set():
        core.write(handle, chosen.randrange(pieces) * _PIECE_BYTES, piece)
    core.release(handle)
