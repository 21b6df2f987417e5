"""Confine the processes of the page that parse untrusted input: the front, and each look.

Guarantees: a protection that this machine has and a filter forbids (of the unit, of a container) is an error, never one less.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from ciuic.cli.commands.web.jobs import FrontJob
from ciuic.errors import NotPermitted
from ciuic.system import seccomp
from ciuic.system.privileges import (
    READER,
    Capability,
    become,
    keep_only,
    leave_network,
    limit_resources,
    no_core_dumps,
    permitted,
)

MAX_MEMORY_BYTES: Final = 1 << 30


def confine(job: FrontJob, profile: seccomp.Profile, processor_seconds: int | None = None) -> list[str]:
    """Drop privileges, network and system calls that reading does not need; call before threads are started.

    Returns:
        The protections that this machine cannot provide, in words.

    Raises:
        NotPermitted: A filter forbids a protection.
    """
    missing = []
    limit_resources(MAX_MEMORY_BYTES, processor_seconds)
    # Where it cannot be written, the process runs without it.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    if job.run_as is not None:
        # Reading a remote takes a network and temporary files. Sockets that are open already, and Unix sockets with a name, are
        # reached all the same.
        if not job.remote and (error := leave_network()):
            if error == errno.EPERM and Capability.SYS_ADMIN in permitted():
                raise NotPermitted(
                    "a process of the page cannot give up the network: unshare(2) is forbidden",
                    hint="RestrictNamespaces= of the unit has to permit net",
                )
            reason = "CAP_SYS_ADMIN is missing" if error == errno.EPERM else os.strerror(error)
            missing.append(f"the network stays: {reason}")
        become(*job.run_as)
        keep_only(READER)
    no_core_dumps()
    if not job.remote:
        try:
            seccomp.install(profile)
        except seccomp.Forbidden as error:
            raise NotPermitted(
                f"a process of the page cannot limit its system calls: {error}",
                hint="SystemCallFilter= of the unit has to permit seccomp",
            ) from error
        except seccomp.Unavailable as error:
            missing.append(f"system calls are not filtered: {error}")
    return missing
