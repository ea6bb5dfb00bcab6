"""An agent whose step speaks token by token. A worker runs it: `perdure worker examples/streaming/agent.py`.

A text stands in for the model: put the stream of your provider's client into `speak` (docs/how-to/models.md).
"""

from __future__ import annotations

import re
import time

import perdure

STORY = "Lisbon lies on seven hills above the Tagus, and its trams climb them slowly. " * 4


@perdure.step
def speak(topic: str, pause_s: float) -> str:
    """Emit the answer in tokens, and return it whole."""
    answer = f"About {topic}: {STORY}".strip()
    for token in re.findall(r"\s*\S+", answer):
        perdure.emit(token)
        time.sleep(pause_s)
    return answer


@perdure.durable
def chat(topic: str, pause_s: float = 0.05) -> str:
    return speak(topic, pause_s)
