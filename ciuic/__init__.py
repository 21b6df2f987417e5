"""ciuic: copy-on-write snapshots under a running job, and an exact way back.

The library half: types, errors, configuration, the repository and everything that reads it back. It imports
neither FUSE nor trio nor click, so that a repository can be read anywhere Python runs.
"""

__version__ = "0.1.0"

STATE_DIR_NAME = b".ciuic-state"
"""The one reserved name at the top of a root's backing directory; the overlay hides it and capture skips it."""
