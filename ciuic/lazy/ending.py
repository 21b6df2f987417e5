"""The end of a lazy restore: the complete tree takes the destination's place.

Guarantee: killed at any point, the next run goes on where this one ended; the destination shows names only of complete content.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ciuic.lazy.layout import LazyLayout, LazyPhase, LazyRecord
from ciuic.protocol import state_directory
from ciuic.system.xattrs import read_xattrs


def finish(layout: LazyLayout, record: LazyRecord, content: int) -> None:
    """Move the tree from the directory ``content`` to the destination, give that its attributes, and remove what is ours.

    Raises:
        OSError: EEXIST where something was put into the destination meanwhile.
    """
    if record.times is None:
        st = os.fstat(content)
        record.times = (st.st_atime_ns, st.st_mtime_ns)
        record.phase = LazyPhase.MOVING
        # Before the first move: a later run must not take what was moved for something that is in the way.
        layout.write(record)
    layout.move(content)
    # The core's, which a remover of trees spares.
    state_directory.remove_state(content)
    layout.finish(lambda: _copy_attributes(content, layout.destination))
    os.utime(layout.destination, ns=record.times)
    os.fsync(layout.destination)


def _copy_attributes(source: int, target: int) -> None:
    """Give a directory owner, extended attributes and mode of another one, in an order in which no user is let in too early."""
    st = os.fstat(source)
    # The target has mode 0700 and is root's until the last step.
    os.chown(target, st.st_uid, st.st_gid)
    wanted = read_xattrs(source)
    for name in read_xattrs(target).keys() - wanted.keys():
        with suppress(OSError):
            os.removexattr(target, name)
    for name, value in wanted.items():
        # What a security module decides stays as it decides; the plain restore has reported what could not be set.
        with suppress(OSError):
            os.setxattr(target, name, value)
    os.chmod(target, stat.S_IMODE(st.st_mode))
