"""The ports that adapters of other frameworks are built on. An adapter imports `perdure`, `perdure.errors` and this.

An adapter that stores checkpoints under ids of its framework uses `store.thread(name).line(namespace)`. One that must
answer blocking and async calls at the same cost drives the flows of lines itself: `LineEngine` with `line_flows` and
`line_listing`, on texts that it has encoded. One whose tasks call steps and effects says which run they belong to:
`add_provider` with a `Task`, and `task_scope` to finish it together with what the task wrote.
"""

from __future__ import annotations

from perdure.log.envelopes import COPY_OF, ENVELOPE, NEEDS, envelope_text
from perdure.log.label_ids import pack_id, unpack_id
from perdure.log.labels import Mark, ParentChanged
from perdure.log.pending import Write, is_large
from perdure.runs.engine import task_scope
from perdure.runs.engine.task_scope import Ending, Task, TaskTurns
from perdure.runs.execution.active_runs import add_provider
from perdure.runs.execution.scope import Scope
from perdure.runs.functions.specs import StepSpec
from perdure.storage.program import Flow, Progress, adrive, drive
from perdure.storage.urls import is_postgres, sqlite_path
from perdure.threads import line_flows, line_reads
from perdure.threads.checks import check_name, check_text
from perdure.threads.line_engine import Encoded, Entry, LineEngine, Part
from perdure.threads.line_listing import Ancestors, Listing, Wanted
from perdure.threads.retention import fields_from as policy_fields
from perdure.threads.retention import set_policy
from perdure.values.codec import Codec, decode, encode
from perdure.values.names import module_name
from perdure.values.plain import is_plain_dict

__all__ = [
    "COPY_OF",
    "ENVELOPE",
    "NEEDS",
    "Ancestors",
    "Codec",
    "Encoded",
    "Ending",
    "Entry",
    "Flow",
    "LineEngine",
    "Listing",
    "Mark",
    "ParentChanged",
    "Part",
    "Progress",
    "Scope",
    "StepSpec",
    "Task",
    "TaskTurns",
    "Wanted",
    "Write",
    "add_provider",
    "adrive",
    "check_name",
    "check_text",
    "decode",
    "drive",
    "encode",
    "envelope_text",
    "is_large",
    "is_plain_dict",
    "is_postgres",
    "line_flows",
    "line_reads",
    "module_name",
    "pack_id",
    "policy_fields",
    "set_policy",
    "sqlite_path",
    "task_scope",
    "unpack_id",
]
