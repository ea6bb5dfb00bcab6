"""The pages and actions of the inspector. To add a page:

1. A module here with one data function, `async def runs(view: PageView) -> dict[str, Any]`. It returns plain data:
   texts, numbers, datetimes, lists, dicts; never a handle. It reads through async twins (`await view.store.aruns()`).
   Every value of users (arguments, results, states, answers) passes through `view.value(…)`, which masks secrets.
   `view.params` has the variable parts of the path, `view.query` the query: the URL holds the whole view.
2. A line in `PAGES`. The JSON twin is `/api` + path, from the same function; `?download=1` makes it a file.
3. A template that extends `base.html` and uses the macros of `parts.html` (imported as `p`). A part with an `id` and
   `data-live` is read again when the store changes, unless it has input. URLs: `link("runs", id, step=4)`, and
   `here(step=4)` for this page with another query. Nothing has `style=`: the policy forbids it.

To add an action: a function in `ACTIONS` of its module, `async def pin(view: PageView, fields: Fields) ->
Confirmation`. A form made with `p.action("pin", fields, "Button")` posts to `/do/pin`. The function checks the form and
returns what a person reads first, with `do`, which acts as `view.who` and returns one sentence. Both may raise
PerdureError: the page then shows its text. `fields["run"]` is a field of the form.
"""

from __future__ import annotations

from perdure.inspector.actions import Action
from perdure.inspector.pages import (
    compare,
    deployments,
    health,
    inbox,
    memory,
    run,
    runs,
    schedules,
    snapshots,
    teams,
    thread,
    threads,
    workers,
)
from perdure.inspector.view import Page

PAGES: tuple[Page, ...] = (
    Page("/", inbox.inbox, "inbox.html"),
    Page("/runs", runs.runs, "runs.html"),
    Page("/runs/{id:name}", run.run, "run.html"),
    Page("/compare", compare.compare, "compare.html"),
    Page("/threads", threads.threads, "threads.html"),
    Page("/threads/{name:name}", thread.thread, "thread.html"),
    Page("/teams", teams.teams, "teams.html"),
    Page("/teams/{name:name}", teams.team, "team.html"),
    Page("/memory", memory.memory, "memory.html"),
    Page("/snapshots", snapshots.snapshots, "snapshots.html"),
    Page("/schedules", schedules.schedules, "schedules.html"),
    Page("/deployments", deployments.deployments, "deployments.html"),
    Page("/workers", workers.workers, "workers.html"),
    Page("/health", health.health, "health.html"),
)

_MODULES = (inbox, runs, run, thread, teams, memory, snapshots, schedules, deployments)
ACTIONS: dict[str, Action] = {action.__name__: action for module in _MODULES for action in module.ACTIONS}

# Paths of events for an EventSource, and the functions that yield them.
STREAMS = (("/tail/{id:name}", run.tail),)

# Path, name, icon, and the key that goes there after `g`.
NAVIGATION = (
    ("", "Inbox", "inbox", "i"),
    ("runs", "Runs", "runs", "r"),
    ("threads", "Threads", "threads", "t"),
    ("teams", "Teams", "teams", "e"),
    ("memory", "Memory", "memory", "m"),
    ("snapshots", "Snapshots", "snapshots", "s"),
    ("schedules", "Schedules", "timeout", "c"),
    ("deployments", "Deployments", "deployments", "d"),
    ("workers", "Workers", "workers", "w"),
    ("health", "Health", "health", "h"),
)
