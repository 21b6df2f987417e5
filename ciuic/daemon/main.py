"""Process setup of the daemon: permission, limits, logs, environment, event loop, exit status."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog
import trio

from ciuic.config import Config, check_owners, load_config, raise_for
from ciuic.daemon.base import logs
from ciuic.daemon.base.process_priority import slice_prefix
from ciuic.daemon.base.systemd import Notifier, take_stored_fds
from ciuic.daemon.service import Daemon
from ciuic.errors import CiuicError, NotPermitted

# Out-of-memory score: below the job's, so that the kernel kills others first, and above a worker's, which the
# job needs at once.
_OOM_SCORE_ADJ = "-500"
# Environment variable that ciuic.service sets: path of the socket of ciuic-workers.service.
WORKER_SERVICE = "CIUIC_WORKER_SERVICE"
log = structlog.get_logger(__name__)


def run_daemon(config: Config, *, reload: Callable[[], Config] | None = None) -> int:
    """Run the daemon; see `ciuic.daemon.run`."""
    if os.geteuid() != 0:
        raise NotPermitted("the daemon mounts file systems and must run as root", hint="sudo ciuic daemon")
    raise_for(check_owners(config))
    as_json = {"json": True, "text": False}.get(config.log.format)
    # Every caller of the control socket takes a descriptor, and callers must not keep captures from starting.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    with suppress(OSError):  # without CAP_SYS_RESOURCE; the systemd unit sets the same value
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ)
    logs.configure(verbose=config.log.level == "debug", as_json=as_json)
    stored_fds = take_stored_fds(os.environ, os.getpid())
    notifier = Notifier.from_environment(os.environ, os.getpid())
    load = reload or (lambda: load_config(config.file))
    try:
        daemon = Daemon(
            config,
            load=load,
            notifier=notifier,
            now_ns=time.time_ns,
            stored_fds=stored_fds,
            command_prefix=slice_prefix(os.environ),
            worker_service=os.environ.get(WORKER_SERVICE, ""),
        )
        trio.run(daemon.main, strict_exception_groups=True)
    except BaseExceptionGroup as group:
        refused = _only(group)
        if refused is not None:
            raise refused from None
        raise
    finally:
        notifier.close()
    return 0


def _only(group: BaseExceptionGroup[BaseException]) -> CiuicError | None:
    """Return the CiuicError that a nursery wrapped; None where the group holds anything else."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]
    return found if isinstance(found, CiuicError) else None


if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup
