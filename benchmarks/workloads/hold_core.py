"""Hold of a cut in the overlay core without a mount, with writing threads and files marked dirty directly."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Sequence

from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.state.node_table import Node

_PIECE_BYTES = 4096
_BETWEEN_CUTS_SECONDS = 0.01
_SWITCH_SECONDS = 0.0005
"""Thread switch interval, the same as in the worker."""


def measure_holds(
    directory: str, *, dirty_files: int, dirty_bytes: int, cuts: int, writers: Sequence[str]
) -> list[int]:
    """Return the microseconds of each hold.

    Args:
        directory: Contains the ``tree`` to mark, the file ``large``, and a file for each writer.
    """
    backing_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    core = OverlayCore(backing_fd, session="0" * 32)
    switch = sys.getswitchinterval()
    try:
        nodes = _look_up_tree(core, f"{directory}/tree")
        large = _node(core, core.names.lookup(ROOT_ID, b"large").node)
        # As in the worker: a garbage collection over a million nodes must not be part of a hold.
        gc.freeze()
        gc.disable()
        sys.setswitchinterval(_SWITCH_SECONDS)
        return _cut_under_load(core, nodes[:dirty_files], large, dirty_bytes, cuts, writers)
    finally:
        sys.setswitchinterval(switch)
        gc.enable()
        gc.unfreeze()
        core.close()
        os.close(backing_fd)


def _look_up_tree(core: OverlayCore, tree: str) -> list[Node]:
    """Look up every file of the tree, as the kernel does."""
    top = core.names.lookup(ROOT_ID, b"tree").node
    nodes = []
    for name in os.listdir(os.fsencode(tree)):
        folder = core.names.lookup(top, name).node
        nodes += [
            _node(core, core.names.lookup(folder, below).node)
            for below in os.listdir(os.fsencode(tree) + b"/" + name)
        ]
    return nodes


def _node(core: OverlayCore, number: int) -> Node:
    return core._state.nodes.get(number)


def _cut_under_load(
    core: OverlayCore, nodes: Sequence[Node], large: Node, dirty_bytes: int, cuts: int, writers: Sequence[str]
) -> list[int]:
    stop = threading.Event()
    threads = [threading.Thread(target=_write_until, args=(core, name, stop)) for name in writers]
    for thread in threads:
        thread.start()
    holds_us = []
    try:
        for _ in range(cuts):
            for node in nodes:
                core._state.tracker.mark_attrs(node)
            core._state.tracker.mark_blocks(large, 0, dirty_bytes)
            time.sleep(_BETWEEN_CUTS_SECONDS)
            cut = core.cut()
            holds_us.append(cut.hold_us)
            core.committed(cut.epoch)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return holds_us


def _write_until(core: OverlayCore, name: str, stop: threading.Event) -> None:
    attributes = core.names.lookup(ROOT_ID, name.encode())
    handle = core.files.open(attributes.node, os.O_RDWR)
    pieces = attributes.st.st_size // _PIECE_BYTES
    generator, piece = random.Random(name), b"w" * _PIECE_BYTES
    while not stop.is_set():
        core.files.write(handle, generator.randrange(pieces) * _PIECE_BYTES, piece)
    core.files.release(handle)
