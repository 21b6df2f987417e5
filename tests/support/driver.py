"""Driver of the mounts in these tests, by CIUIC_TEST_DRIVER: ``kernel``, ``pyfuse3`` or ``kernel-cached``.

The last is the kernel driver as on a kernel without passthrough: all data goes through the kernel's write
cache.
"""

from __future__ import annotations

import os

from ciuic.fuse_layer.driver_choice import WITHOUT_PASSTHROUGH

ASKED_FOR = os.environ.get("CIUIC_TEST_DRIVER", "kernel")
DRIVER = "kernel" if ASKED_FOR == "kernel-cached" else ASKED_FOR
"""Driver name, as workers and the configuration use it."""
PASSES = ASKED_FOR == "kernel"
"""True if data may bypass the worker (passthrough)."""

if ASKED_FOR == "kernel-cached":
    # Every worker inherits it, whichever process starts it.
    os.environ[WITHOUT_PASSTHROUGH] = "1"
