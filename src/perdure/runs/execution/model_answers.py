"""What a span says of a model that a step called: OpenTelemetry's attributes for generative AI.

They come from the answer that the step returns, if it counts tokens as the common APIs do. Names of models and numbers
only, never a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INPUT = ("input_tokens", "prompt_tokens")
_OUTPUT = ("output_tokens", "completion_tokens")


def attributes_of_answer(answer: Any, request: Mapping[str, Any]) -> dict[str, str | int]:
    """Return the attributes of a model's answer; {} if it is none. `request` has the arguments of the step."""
    usage = _get(answer, "usage") or _get(answer, "usage_metadata")
    counts = {
        f"gen_ai.usage.{name}": count
        for name, names in (("input_tokens", _INPUT), ("output_tokens", _OUTPUT))
        if (count := next((n for each in names if type(n := _get(usage, each)) is int), None)) is not None
    }
    if not counts:
        return {}
    said = _get(answer, "model") or _get(_get(answer, "response_metadata"), "model_name")
    models = {"gen_ai.request.model": request.get("model"), "gen_ai.response.model": said}
    return {
        "gen_ai.operation.name": "chat",
        **{name: model for name, model in models.items() if isinstance(model, str)},
        **counts,
    }


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
