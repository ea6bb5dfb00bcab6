"""Keep a chat of LlamaIndex in a store: killed in the middle, the next process has every message that was added.

    python examples/llama_index_chat.py    twice; needs, in a clone: pip install '.[llama-index]'

It needs no model and no network. The first time the process kills itself after the second message.
"""

from __future__ import annotations

import os
import signal

from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer

import perdure
from perdure.llama_index import PerdureChatStore

SAID = [
    ChatMessage("A night in Lisbon, please", role="user"),
    ChatMessage("I found Pension Sol.", role="assistant"),
    ChatMessage("Book it.", role="user"),
]


def chat(store: perdure.Store) -> None:
    memory = ChatMemoryBuffer.from_defaults(
        chat_store=PerdureChatStore(store), chat_store_key="ann", token_limit=4000, tokenizer_fn=str.split
    )
    known = len(memory.get_all())
    print("messages before:", known, flush=True)
    for message in SAID[known:]:
        memory.put(message)
        if known == 0 and len(memory.get_all()) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    print([message.content for message in memory.get()])


if __name__ == "__main__":
    with perdure.open("llama_index.db") as store:
        chat(store)
