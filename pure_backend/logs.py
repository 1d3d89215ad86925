"""The decision log: what the compiler does and why, one line each, by topic.

Topics are the loggers `pure_backend.<topic>` of Python's `logging`, at level INFO; `PURE_BACKEND_LOG=specialize,cache` or
`set_logs("specialize", "cache")` switches them on. Where the program has set up no logging of its own, lines go to stderr.
"""

from __future__ import annotations

import logging
import os

TOPICS = (
    "specialize",  # a call unlike all before, and what is unlike
    "normalize",
    "propagate",
    "unwrap",
    "mutation",
    "repeats",
    "partition",
    "trace",
    "differentiate",
    "lower",
    "compile",
    "cache",  # programs found in memory and on disk, and what is not stored
)


def set_logs(*topics: str) -> None:
    """Log decisions of these topics, and of no others.

    Args:
        topics: Of `TOPICS`, or `all`.

    Raises:
        ValueError: There is no such topic.

    Example:
        >>> set_logs("specialize", "cache")
        >>> set_logs()  # off
    """
    unknown = sorted(set(topics) - {*TOPICS, "all"})
    if unknown:
        raise ValueError(f"no log topic {', '.join(map(repr, unknown))}: topics are {', '.join(TOPICS)}, all")
    for topic in TOPICS:
        on = topic in topics or "all" in topics
        logging.getLogger(f"pure_backend.{topic}").setLevel(logging.INFO if on else logging.NOTSET)
    logger = logging.getLogger("pure_backend")
    if topics and not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())


class _ToStderr(logging.StreamHandler):
    """Writes lines that no handler of the program's would show."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(name)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless the root logger has handlers for it."""
        if not logging.getLogger().handlers:
            super().emit(record)


def set_logs_from_environment() -> None:
    """Switch on the topics of `PURE_BACKEND_LOG`."""
    topics = [topic.strip() for topic in os.environ.get("PURE_BACKEND_LOG", "").split(",")]
    if any(topics):
        set_logs(*filter(None, topics))
