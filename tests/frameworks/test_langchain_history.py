"""Histories of LangChain in a store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_contract import SessionContract
from langchain_core.messages import AIMessage, HumanMessage
from langchain_history_shop import PerdureChatMessageHistory

import perdure


class TestContract(SessionContract):
    module = "langchain_history_shop"


def test_messages_are_those_that_were_added_to_the_session(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "store.db")) as store:
        ann, bob = (PerdureChatMessageHistory(session, store) for session in ("ann", "bob"))
        assert ann.messages == []
        ann.clear()
        call = AIMessage("", tool_calls=[{"name": "pay", "args": {"cents": 900}, "id": "c1"}])
        ann.add_messages([HumanMessage("hi"), call])
        asyncio.run(ann.aadd_messages([AIMessage("paid")]))
        bob.add_user_message("hello")
        assert asyncio.run(PerdureChatMessageHistory("ann", store).aget_messages()) == ann.messages
        assert ann.messages == [HumanMessage("hi"), call, AIMessage("paid")]
        asyncio.run(ann.aclear())
        assert (ann.messages, bob.messages) == ([], [HumanMessage("hello")])


def test_in_a_run_a_message_is_added_once(tmp_path: Path) -> None:
    with perdure.open(str(tmp_path / "store.db")) as store:

        @perdure.durable(name="langchain.history")
        def talk() -> int:
            history = PerdureChatMessageHistory("ann", store)
            seen = len(history.messages)
            history.add_user_message("hi")
            perdure.ask("Go on?")
            return seen

        store.run(talk, id="talk")
        store.answer("talk", "yes")
        assert store.run(talk, id="talk").result() == 0
        assert len(PerdureChatMessageHistory("ann", store).messages) == 1
