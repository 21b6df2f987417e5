"""Log events of the repository. structlog is imported when there is something to say: most commands never do."""

from __future__ import annotations


def warning(event: str, **fields: object) -> None:
    """Something is not as it should be, and was dealt with."""
    import structlog

    structlog.get_logger("ciuic.repository").warning(event, **fields)


def info(event: str, **fields: object) -> None:
    """Something that an operator may want to know afterwards."""
    import structlog

    structlog.get_logger("ciuic.repository").info(event, **fields)
