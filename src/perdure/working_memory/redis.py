"""Scratchpads in Redis, for work outside of durable functions that several processes share and that may be lost.

`RedisPad` keeps the entries of one `Scratchpad` under one key that expires. Redis is no store of Perdure: nothing here
commits with a step. docs/how-to/where-to-put-what.md says when that is right.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson

from perdure.errors import ExtraMissing, Unavailable
from perdure.memory.policies import check_number

if TYPE_CHECKING:
    from redis import Redis

# Replaces the value if it has not changed meanwhile. An absent key is "".
_REPLACE = """
local now = redis.call('GET', KEYS[1]) or ''
if now ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


class RedisPad:
    """The entries of a scratchpad under a key of Redis: `Scratchpad(4000, backend=RedisPad(client, "task-7"))`.

    The key is removed `ttl_s` seconds after the last entry was added. Processes that add to the same key lose no entry
    of each other.
    """

    def __init__(self, client: Redis, key: str, *, ttl_s: int = 3600) -> None:
        try:
            import redis
        except ImportError as error:
            raise ExtraMissing("RedisPad", "redis") from error
        self._error = redis.RedisError
        self._client, self._key = client, f"perdure:scratchpad:{key}"
        self._ttl_ms = check_number("RedisPad(ttl_s=…)", ttl_s) * 1000

    def load(self) -> tuple[list[dict[str, Any]], bytes]:
        """Return the entries, and what `replace` needs to know that they are still the same."""
        stored = self._call("get", self._key) or b""
        stored = stored.encode() if isinstance(stored, str) else stored  # a client with decode_responses=True
        entries = [{**entry, "at": datetime.fromisoformat(entry["at"])} for entry in orjson.loads(stored or b"[]")]
        return entries, stored

    def replace(self, entries: list[dict[str, Any]], before: bytes) -> bool:
        """Write the entries. Return False, and write nothing, if they have changed since they were loaded."""
        return bool(self._call("eval", _REPLACE, 1, self._key, before, orjson.dumps(entries), self._ttl_ms))

    def clear(self) -> None:
        """Remove all entries now."""
        self._call("delete", self._key)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._client, name)(*arguments)
        except self._error as error:
            raise Unavailable(f"the scratchpad {self._key!r} in Redis is not available: {error}") from error
