"""Register the types that LangGraph itself puts into checkpoints.

They are those that LangGraph lists as safe to load (except messages, which `perdure.langchain` registers), and the
agent actions of langchain-core. Each is stored as its fields. Loading calls only their constructors, with arguments of
the expected types. Fields that a newer version of LangGraph has stored and this one does not have are dropped.
"""

from __future__ import annotations

import ipaddress
import re
from collections import deque
from collections.abc import Callable
from typing import Any

from langchain_core.agents import AgentAction, AgentActionMessageLog, AgentFinish, AgentStep
from langchain_core.documents import Document
from langchain_core.messages.base import TextAccessor
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.store.base import GetOp, Item, SearchItem
from langgraph.types import Command, Interrupt, Overwrite, PregelTask, Send, StateSnapshot, TimeoutPolicy

from perdure import register
from perdure.adapters import register_foreign

_FIELDS = (_DeltaSnapshot, Command, Document, GetOp, Interrupt, Overwrite, PregelTask, StateSnapshot, TimeoutPolicy)
_AGENTS = (AgentAction, AgentActionMessageLog, AgentFinish, AgentStep)
_ADDRESSES = (
    ipaddress.IPv4Address,
    ipaddress.IPv4Interface,
    ipaddress.IPv4Network,
    ipaddress.IPv6Address,
    ipaddress.IPv6Interface,
    ipaddress.IPv6Network,
)
_ITEM = ("value", "key", "namespace", "created_at", "updated_at")


def _dump_slots(names: tuple[str, ...]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: getattr(value, name) for name in names}


def _load_slots(cls: type, names: tuple[str, ...]) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: cls(**{name: fields[name] for name in names if name in fields})


def _load_send(fields: dict[str, Any]) -> Send:
    send = Send(fields["node"], fields["arg"])
    if fields.get("timeout") is not None:
        send.timeout = fields["timeout"]
    return send


def _load_pattern(parts: list[Any]) -> re.Pattern[Any]:
    pattern, flags = parts
    if not isinstance(pattern, str | bytes) or type(flags) is not int:
        raise ValueError("a pattern is text and flags")
    return re.compile(pattern, flags)


def register_types() -> None:
    """Register LangGraph's types. May be called again."""
    for cls in (*_FIELDS, *_AGENTS):
        register_foreign(cls)
    register(Send, dump=_dump_slots(("node", "arg", "timeout")), load=_load_send)
    for item, names in ((Item, _ITEM), (SearchItem, (*_ITEM, "score"))):
        register(item, dump=_dump_slots(names), load=_load_slots(item, names))
    for address in _ADDRESSES:
        register(address, dump=str, load=address)
    register(TextAccessor, dump=lambda value: str.__str__(value), load=TextAccessor)  # the type of message.text
    register(deque, dump=lambda value: [list(value), value.maxlen], load=lambda parts: deque(*parts))
    register(re.Pattern, dump=lambda value: [value.pattern, value.flags], load=_load_pattern)


register_types()
