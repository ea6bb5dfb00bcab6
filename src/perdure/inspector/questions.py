"""Questions of runs as people answer them: the form of a question, and the value that a filled form stands for."""

from __future__ import annotations

import json
from typing import Any

from perdure import Question
from perdure.errors import UsageError
from perdure.inspector import values
from perdure.inspector.actions import Fields, value_in
from perdure.inspector.view import PageView

Schema = dict[str, Any]
_INPUTS = {"integer": "number", "number": "number", "boolean": "checkbox", "string": "text"}


def card(view: PageView, question: Question) -> dict[str, Any]:
    """Return a question for a page."""
    step = question.step or question.path
    if question.kind == "doubt":
        command = view.command("run resolve", question.run, step, done="<result as JSON>")
    else:
        command = view.command("answer", question.run, question.path, "<answer>")
    return values.pick(question, "run path kind reason effect key approvers quorum asked_at deadline thread") | {
        "step": step,
        "text": f"Did {question.effect} happen?" if question.kind == "doubt" and question.effect else question.text,
        "arguments": view.value(question.arguments),
        "answers": [{"who": who, "value": view.value(value), "at": at} for who, value, at in question.answers],
        "may_answer": question.approvers is None or view.who in question.approvers,
        "form": form_of(question),
        "command": command,
    }


def form_of(question: Question) -> dict[str, Any]:
    """Return what a person fills in: {"kind": doubt, approval, options, or fields, …}."""
    if question.kind in ("doubt", "approval"):
        return {"kind": question.kind}
    if question.options is not None:
        return {"kind": "options", "options": [values.brief(values.plain(one), 300) for one in question.options]}
    schema = _resolved(question.schema or {}, question.schema or {})
    if schema.get("type") == "boolean":
        return {"kind": "approval"}
    if schema.get("type") == "object" and schema.get("properties"):
        return {"kind": "fields", "fields": _fields(schema, question.schema or {})}
    return {"kind": "fields", "fields": [_field("answer", "Answer", schema, required=True)], "is_value": True}


def _fields(schema: Schema, root: Schema) -> list[dict[str, Any]]:
    required = schema.get("required") or ()
    return [
        _field(str(name), str(part.get("title") or name), _resolved(part, root), required=name in required)
        for name, part in schema["properties"].items()
        if isinstance(part, dict)
    ]


def _resolved(schema: Schema, root: Schema) -> Schema:
    """Return a schema with its reference followed, and without the "or null" of an optional field."""
    for _ in range(20):  # a schema may refer to itself
        if str(schema.get("$ref", "")).startswith("#/$defs/"):
            part = (root.get("$defs") or {}).get(schema["$ref"].removeprefix("#/$defs/"))
            schema = part if isinstance(part, dict) else {}
        elif len(some := [one for one in schema.get("anyOf") or () if one.get("type") != "null"]) == 1:
            schema = {**some[0], **{key: value for key, value in schema.items() if key in ("title", "description")}}
        else:
            break
    return schema


def _field(name: str, title: str, schema: Schema, *, required: bool) -> dict[str, Any]:
    options = schema.get("enum")
    return {
        "name": name,
        "title": title,
        "hint": str(schema.get("description") or ""),
        "required": required,
        "input": "select" if options else _INPUTS.get(str(schema.get("type")), "json"),
        "options": [values.brief(values.plain(one), 200) for one in options or ()],
        "min": schema.get("minimum"),
        "max": schema.get("maximum"),
        "step": "1" if schema.get("type") == "integer" else "any",
    }


def answer_in(question: Question, fields: Fields) -> Any:
    """Return the value that a filled form stands for. Raises UsageError."""
    form = form_of(question)
    if form["kind"] == "options":
        return _chosen(question.options or [], fields["option"])
    if form["kind"] == "approval":
        return fields["answer"] == "yes"
    schema = _resolved(question.schema or {}, question.schema or {})
    if form.get("is_value"):
        return _value(form["fields"][0], schema, fields)
    answer = {}
    for one in form["fields"]:
        part = _resolved(schema["properties"][one["name"]], question.schema or {})
        if fields.get(f"field-{one['name']}") or one["input"] == "checkbox" or one["required"]:
            answer[one["name"]] = _value(one, part, fields)
    return answer


def _value(field: dict[str, Any], schema: Schema, fields: Fields) -> Any:
    text = fields.get(f"field-{field['name']}")
    if field["input"] == "select":
        return _chosen(schema["enum"], text)
    if field["input"] == "checkbox":
        return text == "on"
    if field["input"] == "text":
        return text
    if not schema:
        return value_in(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        what = "a number" if field["input"] == "number" else 'JSON, such as ["a", "b"]'
        raise UsageError(f"{field['title']}: {what} is needed, not {text[:60]!r}") from None


def _chosen(options: list[Any], number: str) -> Any:
    if not number.isdecimal() or int(number[:9]) >= len(options):
        raise UsageError("choose one of the options")
    return options[int(number)]
