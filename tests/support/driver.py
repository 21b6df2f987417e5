"""What serves the mounts of these tests, by CIUIC_TEST_DRIVER: ``kernel``, ``pyfuse3``, or ``kernel-cached``, which is the
kernel driver as on a kernel without passthrough: everything goes through the kernel's cache, written back."""

from __future__ import annotations

import os

from ciuic.fuse_layer.driver_choice import WITHOUT_PASSTHROUGH

ASKED_FOR = os.environ.get("CIUIC_TEST_DRIVER", "kernel")
DRIVER = "kernel" if ASKED_FOR == "kernel-cached" else ASKED_FOR
"""As workers and the configuration know it."""
PASSES = ASKED_FOR == "kernel"
"""Whether data may pass the worker by."""

if ASKED_FOR == "kernel-cached":
    os.environ[WITHOUT_PASSTHROUGH] = "1"  # inherited by every worker, whoever starts it
