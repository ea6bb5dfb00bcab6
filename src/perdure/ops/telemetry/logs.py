"""`perdure.ops.logs`: the library's log as JSON lines.

Perdure logs through `logging.getLogger("perdure")`, as the application has set it up. Each record has an event, whose
name is stable, and fields. No record holds a state, an argument, a result, the text of an error that user code raised,
or a password.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from perdure.storage.events import FIELD

__all__ = ["JsonFormatter", "json_lines"]

LOGGER = "perdure"


class JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON object: time, level, logger, event, message, then the event's own fields.

    Records of other libraries have the event "log".
    """

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, FIELD, {}))
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": fields.pop("event", "log"),
            "message": record.getMessage(),
        }
        for name, value in fields.items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def json_lines(stream: TextIO | None = None, *, level: int | str = logging.INFO) -> logging.Handler:
    """Write the library's log from `level` up to a stream (default: stderr), one JSON object per line.

    Returns the handler; `logging.getLogger("perdure").removeHandler(handler)` stops the log.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    handler.setLevel(level)
    logger = logging.getLogger(LOGGER)
    if logger.level == logging.NOTSET or logger.level > handler.level:
        logger.setLevel(handler.level)
    logger.addHandler(handler)
    return handler
