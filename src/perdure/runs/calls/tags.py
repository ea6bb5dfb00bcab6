"""Tags of runs: short texts by which runs are found. `perdure.tag` changes those of the run that calls it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial

import orjson

from perdure.errors import UsageError
from perdure.runs.calls.steps import answer
from perdure.runs.calls.timeouts import recorded_call
from perdure.runs.execution.execution import Execution
from perdure.runs.execution.operation import Operation
from perdure.runs.execution.scope import Scope
from perdure.runs.functions.inputs import digest
from perdure.runs.journal.entries import DONE, Entry
from perdure.runs.journal.kinds import CallKind, declare
from perdure.runs.journal.rows import BY_NUMBER
from perdure.runs.run_table import RunRow, tags_of
from perdure.runs.tables import TAG_VALUE, TAGS
from perdure.storage.program import Batch, Rows, Sql
from perdure.threads.checks import check_name, check_text, exact

TAG = declare(CallKind("perdure.tag", is_changeable=False))
TAGS_MAX = 20
# Both together must fit an entry of PostgreSQL's indexes: 2704 bytes.
_KEY_CHARACTERS_MAX, _VALUE_CHARACTERS_MAX = 100, 200
_SET = Sql(
    "UPDATE run SET tags = :tags WHERE tenant = :tenant AND run = :run",
    seals={"tags": TAGS},
)
_DROP = Sql("DELETE FROM run_tag WHERE tenant = :tenant AND run = :run")
_ADD = Sql(
    "INSERT INTO run_tag (tenant, key, value, at, run) VALUES (:tenant, :key, :value, :at, :run)",
    seals={"value": TAG_VALUE},
)


def check_tags(tags: object, *, removes: bool = False) -> dict[str, str]:
    """Return tags as texts; numbers become text. With `removes`, None stays "". Raises UsageError."""
    if tags is None:
        return {}
    if not isinstance(tags, Mapping):
        raise UsageError(f'tags= is a mapping such as {{"customer": "c-42"}}, not {type(tags).__name__}')
    if len(tags) > TAGS_MAX:
        raise UsageError(f"a run has at most {TAGS_MAX} tags, not {len(tags)}")
    return {_key(key): "" if value is None and removes else _value(key, value) for key, value in tags.items()}


def _key(key: object) -> str:
    name = check_name(key, "tag")
    if len(name) > _KEY_CHARACTERS_MAX or "=" in name:
        raise UsageError(f"a tag's name has at most {_KEY_CHARACTERS_MAX} characters, and no '=': {name[:60]!r}")
    return name


def _value(key: object, value: object) -> str:
    if type(value) is int:
        if abs(value) >= 10**_VALUE_CHARACTERS_MAX:  # Python refuses to write very long ones
            raise UsageError(f"the value of tag {key!r} is a number with more than {_VALUE_CHARACTERS_MAX} digits")
        value = str(value)
    if not isinstance(value, str):
        raise UsageError(f"the value of tag {key!r} is text or a whole number, not {type(value).__name__}")
    if not 1 <= len(value) <= _VALUE_CHARACTERS_MAX:
        raise UsageError(f"the value of tag {key!r} has 1 to {_VALUE_CHARACTERS_MAX} characters, not {len(value)}")
    check_text(value, f"the value of tag {key!r}")
    return exact(value)


def tags_text(tags: Mapping[str, str]) -> str | None:
    """Return the JSON that a run's row stores; None if there are no tags."""
    return orjson.dumps(dict(tags), option=orjson.OPT_SORT_KEYS).decode() if tags else None


def tag_operation(scope: Scope, path: str, tags: dict[str, str]) -> Operation[None]:
    """Change tags of the run, in the transaction that records the call. An empty value removes a tag."""
    execution, name = scope.execution, TAG.name
    args_hash = digest(orjson.dumps(tags, option=orjson.OPT_SORT_KEYS))
    _, ended = yield from recorded_call(scope, path, name, args_hash)
    if ended is not None:
        yield from answer(execution, ended)
        return
    entry = Entry(path, name, execution.ctx.clock_us(), args_hash)
    yield from execution.journal.commit(partial(_change, execution, tags), (DONE, entry))


def _change(execution: Execution, tags: dict[str, str]) -> Generator[Batch, list[Rows], None]:
    key = {"tenant": execution.tenant, "run": execution.row.run}
    [rows] = yield Batch(BY_NUMBER(**key))
    row = RunRow._make(rows[0])
    after = {name: value for name, value in (tags_of(row.tags) | tags).items() if value}
    if len(after) > TAGS_MAX:
        raise UsageError(f"perdure.tag(): a run has at most {TAGS_MAX} tags, and this one would have {len(after)}")
    yield Batch(
        _SET(**key, id=row.id, function=row.function, tags=tags_text(after)),
        _DROP(**key),
        *(_ADD(**key, key=name, value=value, at=row.created_at) for name, value in after.items()),
    )
