"""Log events of the repository.

structlog is imported with the first event: most commands have none. Where ``sink`` is set, it takes the
events instead: the command line keeps stdout for results and reports what matters itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

sink: Callable[[str, Mapping[str, object]], None] | None = None
"""Function called with event and fields."""


def warning(event: str, **fields: object) -> None:
    """Log something unexpected that was dealt with."""
    if sink is not None:
        sink(event, fields)
        return
    # 0.11 s: its development part imports rich (docs/decisions/where-snapshots-spend.md).
    import structlog

    structlog.get_logger("ciuic.repository").warning(event, **fields)


def info(event: str, **fields: object) -> None:
    """Log something that an operator may want to know afterwards."""
    if sink is not None:
        sink(event, fields)
        return
    import structlog

    structlog.get_logger("ciuic.repository").info(event, **fields)
