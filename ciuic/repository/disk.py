"""The durable operations, all in one object, so that a test can make the nth fail, tear writes, or lose
unsynced ones.
"""

from __future__ import annotations


class Disk:
    """The real disk."""
