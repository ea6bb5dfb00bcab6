"""The commands about long-term memory: `perdure memory …`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, memory_group, root, with_store
from perdure.cli.health import print_fields
from perdure.cli.parameters import (
    COUNT,
    POSITIVE,
    Labels,
    duration,
    full_option,
    limit_option,
    namespace,
    namespace_text,
    pair,
    parse_value,
    since,
    yes_option,
)
from perdure.cli.retention import print_erased
from perdure.cli.text import ago, local, plural, readable, shorten, size, to_json
from perdure.errors import NotFound, UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.memory import Item, Memory

VALUE_WIDTH = 100
KEPT = "The history keeps what was there."
namespace_argument = click.argument("labels", metavar="NAMESPACE", type=namespace)
scope_argument = click.argument("labels", metavar="[NAMESPACE]", type=namespace, required=False, default="/")
where_option = click.option(
    "--where",
    metavar="FIELD=VALUE",
    type=pair,
    multiple=True,
    help="Only items whose value has this field (may be repeated: all must match).",
)
kind_option = click.option("--kind", metavar="KIND", help="Only items of this kind, such as semantic or episodic.")
embedder_option = click.option(
    "--embedder",
    metavar="NAME",
    envvar="PERDURE_EMBEDDER",
    help="What the application opens the store with: local, or APP:FUNCTION (or $PERDURE_EMBEDDER).",
)


@command(memory_group, "Inspect", "perdure memory namespaces\nperdure memory namespaces --json | jq .items")
@with_store
def namespaces(cli: Invocation, store: Store) -> None:
    """List the namespaces, each with its items and their size.

    --json prints a line per namespace.
    """
    cli.listing(
        store.memory().namespaces(),
        ("namespace", "items", "size"),
        lambda one: [namespace_text(one.labels), f"{one.items:,}", size(one.size_bytes)],
        empty="no memory in this store for this tenant",
        right=(1, 2),
        document=lambda one: {"namespace": namespace_text(one.labels), **readable(one)},
    )


@command(
    memory_group,
    "Inspect",
    "perdure memory items users/alice\nperdure memory items users --where topic=ui --json | jq .value",
)
@namespace_argument
@where_option
@kind_option
@limit_option
@with_store
def items(
    cli: Invocation, store: Store, labels: Labels, where: tuple[tuple[str, Any], ...], kind: str | None, limit: int
) -> None:
    """List the items of a namespace and of all below it, the newest first.

    --json prints a line per item.
    """
    found = _raw(store, labels).list(where=dict(where) or None, kind=kind, limit=limit or None)
    empty = "no items match" if where or kind else "no items there; `perdure memory namespaces` lists the namespaces"
    _print_items(cli, found, empty=empty)
    if limit and len(found) == limit and not cli.json:
        cli.message(f"the newest {limit}; there may be more: --limit 0 lists all")


@command(
    memory_group,
    "Inspect",
    "perdure memory get users/alice theme\nperdure memory get users/alice theme --history\n"
    "perdure memory get users/alice theme --as-of 2d --json | jq .value",
)
@namespace_argument
@click.argument("key")
@click.option("--history", is_flag=True, help="All its versions, the oldest first.")
@click.option("--as-of", metavar="TIME", type=since, help="As it was known then: 30m, 2h, 3d, 1w ago or an ISO date.")
@with_store
def get(cli: Invocation, store: Store, labels: Labels, key: str, history: bool, as_of: datetime | None) -> None:
    """Show an item, or with --history all versions of it.

    Exits with 3 if there is none. A version that says "cap", "expired" or "deleted" tells why the item went.
    """
    memory = _raw(store, labels)
    memory = memory if as_of is None else memory.as_of(as_of)
    if history:
        versions = memory.history(key)
        if versions:
            return cli.listing(
                versions,
                ("version", "time", "value"),
                lambda one: [str(one.version), local(one.at), _brief(one)],
                empty="",
                document=_document,
            )
    elif (item := memory.get(key)) is not None:
        if cli.json:
            return cli.document(_document(item))
        cli.line(item.key, f"version {item.version}", local(item.at), item.kind, *_marks(item))
        return cli.state(readable(item.value))
    place = namespace_text(labels)
    raise NotFound(f"there is no item {key!r} in {place}; `perdure memory items {place}` lists what is there")


@command(
    memory_group,
    "Inspect",
    'perdure memory search users "outdoor activities" --embedder local\n'
    'perdure memory search users/alice "dark mode" --where topic=ui --limit 3\n'
    "perdure memory search / invoices --explain --json | jq .explain",
)
@namespace_argument
@click.argument("query")
@where_option
@kind_option
@click.option("--limit", metavar="N", type=POSITIVE, default=10, help="At most N (default 10).")
@click.option("--relevant", is_flag=True, help="Leave out what is not about the query.")
@click.option("--explain", is_flag=True, help="Show how each score came about.")
@embedder_option
@click.pass_obj
def search(
    cli: Invocation,
    labels: Labels,
    query: str,
    where: tuple[tuple[str, Any], ...],
    kind: str | None,
    limit: int,
    relevant: bool,
    explain: bool,
    embedder: str | None,
) -> None:
    """Find the items of a namespace, and of all below it, that fit a query best.

    By their words; with --embedder also by their meaning. Needs the extra `search`. --json prints a line per item.
    """
    with _open(cli, embedder) as store:
        memory = _raw(store, labels)
        found = memory.search(
            query, limit=limit, where=dict(where) or None, kind=kind, relevant=relevant, explain=explain
        )
        empty = "nothing was found" if found else _nothing(memory, labels, embedder)
    _print_items(cli, found, empty=empty, scored=True)


@command(
    memory_group,
    "Control",
    'perdure memory put users/alice theme \'{"fact": "Alice prefers dark mode"}\' --pin\n'
    'perdure memory put users/alice visit "Alice is in Lisbon" --kind episodic --ttl 7d',
)
@namespace_argument
@click.argument("key")
@click.argument("value")
@click.option("--text", metavar="TEXT", help="What it is found by (default: every text in the value).")
@click.option("--kind", metavar="KIND", default="semantic", help="Its kind (default: semantic).")
@click.option("--pin", is_flag=True, help="No cap and no age removes it.")
@click.option("--ttl", metavar="TIME", type=duration, help="It expires after 45s, 30m, 2h, 30d or 8w.")
@click.option("--expect", metavar="N", type=COUNT, help="The version that must be there (0: none), or nothing is done.")
@embedder_option
@click.pass_obj
def put(
    cli: Invocation,
    labels: Labels,
    key: str,
    value: str,
    text: str | None,
    kind: str,
    pin: bool,
    ttl: timedelta | None,
    expect: int | None,
    embedder: str | None,
) -> None:
    """Store a value under a key. What was there stays in the history."""
    with _open(cli, embedder) as store:
        item = store.memory(*labels).put(
            key,
            parse_value(value),
            text=text,
            kind=kind,
            pinned=pin,
            ttl_s=None if ttl is None else ttl.total_seconds(),
            expect=expect,
            source="perdure memory put",
        )
    cli.result(f"{namespace_text(labels)} {key}: version {item.version}", _document(item))


@command(
    memory_group,
    "Control",
    "perdure memory forget users/alice theme --yes\n"
    "perdure memory forget users --where topic=ui --yes\nperdure memory forget users/alice --all --yes",
)
@namespace_argument
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@where_option
@kind_option
@click.option("--all", "everything", is_flag=True, help="All items of the namespace, and of all below it.")
@yes_option
@with_store
def forget(
    cli: Invocation,
    store: Store,
    labels: Labels,
    keys: tuple[str, ...],
    where: tuple[tuple[str, Any], ...],
    kind: str | None,
    everything: bool,
    yes: bool,
) -> None:
    """Delete items: those of some keys, those that match, or --all.

    Their history stays as long as the policy says; `perdure memory erase` removes it too.
    """
    if bool(keys) + bool(where or kind) + everything != 1:
        raise UsageError("name the keys, or what to match (--where, --kind), or --all: one of these")
    memory, place = _raw(store, labels), namespace_text(labels)
    if keys:
        cli.confirm(f"Delete {', '.join(map(repr, keys))} of {place}?", yes=yes, after=KEPT)
        count = sum(memory.delete(key) for key in keys)
    else:
        which = "all" if everything else "the matching"
        cli.confirm(f"Delete {which} items of {place} and of all below it?", yes=yes, after=KEPT)
        count = memory.forget(dict(where), kind=kind)
    if keys and not count:
        raise NotFound(f"{place} has no such item: nothing was deleted")
    cli.result(f"{plural(count, 'item')} deleted", namespace=place, deleted=count)


@command(
    memory_group,
    "Remove and move",
    "perdure memory erase users/alice theme --yes\nperdure memory erase users/alice --yes\n"
    "perdure memory erase --label alice --yes --json",
)
@scope_argument
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--label", metavar="LABEL", help="Every namespace with this label: a user, wherever the label is.")
@full_option
@yes_option
@with_store
def erase(
    cli: Invocation, store: Store, labels: Labels, keys: tuple[str, ...], label: str | None, full: bool, yes: bool
) -> None:
    """Erase items for good, with their history, from snapshots and the store's own files.

    Erases the items of some keys; without keys all of the namespace and of all below it, with its name and policy.
    """
    memory, place = store.memory(*labels), namespace_text(labels)
    if label is not None and keys:
        raise UsageError("name keys, or --label: one of these")
    what = ", ".join(map(repr, keys)) or "everything" if label is None else f"every namespace with the label {label!r}"
    cli.confirm(f"Erase {what} in {place}?", yes=yes, after="It cannot be brought back.")
    if label is not None:
        done = [memory.erase_label(label, full=full)]
    elif keys:
        done = [memory.erase(key, full=full) for key in keys]
    else:
        done = [memory.erase_all(full=full)]
    versions = sum(one.versions for one in done)
    if not versions and not done[-1].namespaces:
        raise NotFound(
            f"{place} has no such item, in its history either"
            if keys
            else f"there is no namespace {place}"
            if label is None
            else f"there is no namespace with the label {label!r} in {place}"
        )
    print_erased(replace(done[-1], versions=versions), cli, f"{plural(versions, 'version')} of items in {place}")


@command(memory_group, "State of the store", "perdure memory stats\nperdure memory stats users --embedder local --json")
@scope_argument
@embedder_option
@click.pass_obj
def stats(cli: Invocation, labels: Labels, embedder: str | None) -> None:
    """Count namespaces, items, versions and bytes.

    `embedded` are the versions that have a vector of --embedder.
    """
    with _open(cli, embedder) as store:
        found = store.memory(*labels).stats()
    if cli.json:
        return cli.document(found)
    return print_fields(cli, found, {})


@command(
    memory_group,
    "Control",
    "perdure memory migrate app.py\nperdure memory migrate myapp.schemas users/alice",
)
@click.argument("app")
@scope_argument
@with_store
def migrate(cli: Invocation, store: Store, app: str, labels: Labels) -> None:
    """Bring items to the newest version of their schema, with the migrations of an app.

    Items are migrated when they are read, too; this is for removing old migrations. Of a call that was interrupted
    the same call does the rest.
    """
    from perdure.runs.workers.loading import load_named

    load_named(app)
    with cli.progress("migrating") as progress:
        count = store.memory(*labels).migrate(progress=progress)
    cli.result(f"{plural(count, 'item')} migrated", namespace=namespace_text(labels), migrated=count)


@command(
    memory_group,
    "Control",
    "perdure memory reembed --embedder local\nperdure memory reembed users --embedder app.py:embed",
)
@scope_argument
@embedder_option
@click.pass_obj
def reembed(cli: Invocation, labels: Labels, embedder: str | None) -> None:
    """Embed the items that have no vector of the embedder.

    After it was changed, or has failed.

    Until then they are found by their words. Of a call that was interrupted the same call does the rest.
    """
    if embedder is None:
        raise UsageError("which embedder? Give --embedder local, or --embedder app.py:embed")
    with _open(cli, embedder) as store, cli.progress("embedding") as progress:
        count = store.memory(*labels).reembed(progress=progress)
    cli.result(f"{plural(count, 'item')} embedded", namespace=namespace_text(labels), embedded=count)


@command(
    root,
    "Memory",
    "perdure mcp agent.db --namespace users/alice\nperdure mcp agent.db --namespace users/alice --read-only",
)
@click.argument("url", metavar="[STORE]", required=False)
@click.option("--namespace", "labels", metavar="NAMESPACE", type=namespace, required=True, help="Whose memory it is.")
@click.option("--read-only", is_flag=True, help="Only memory_search.")
@embedder_option
@click.pass_obj
def mcp(cli: Invocation, url: str | None, labels: Labels, read_only: bool, embedder: str | None) -> None:
    """Serve the memory of a namespace to a model: an MCP server.

    It speaks the Model Context Protocol on stdin and stdout. Its tools, memory_search, memory_save and memory_forget,
    reach this namespace of this tenant only; a search also what is below it. Needs the extra `mcp`.
    """
    from perdure.memory.mcp import serve

    cli.store = url or cli.store
    with _open(cli, embedder) as store:
        serve(_raw(store, labels), read_only=read_only)


def _open(cli: Invocation, embedder: str | None) -> Store:
    """The store with an embedder: "local", or a function of an app."""
    if embedder is None or embedder == "local":
        return cli.open(embedder=embedder)
    from perdure.runs.workers.loading import load_named

    found = load_named(embedder) if ":" in embedder else None
    if not callable(found) and not hasattr(found, "embed_documents"):
        raise UsageError(f"--embedder {embedder}: local, or the function of an app, such as app.py:embed")
    return cli.open(embedder=found)


def _nothing(memory: Memory, labels: Labels, embedder: str | None) -> str:
    """What an empty search says: why, if it can be known."""
    stats, place = memory.stats(), namespace_text(labels)
    if not stats.items:
        return f"nothing was found: there are no items in {place}; `perdure memory namespaces` lists them"
    if embedder is not None and not stats.embedded:
        run = f"perdure memory reembed {place} --embedder {embedder}"
        return f"nothing was found: no item has a vector of {embedder}; run `{run}`"
    return "nothing was found"


def _raw(store: Store, labels: Labels) -> Memory:
    """A namespace whose values are read without their classes."""
    from perdure.memory import Memory

    return Memory(store._context, labels, raw=True)


def _print_items(cli: Invocation, found: list[Item], *, empty: str, scored: bool = False) -> None:
    now = datetime.now(UTC)

    def row(item: Item) -> list[str]:
        parts = " ".join(f"{name} {part:.2f}" for name, part in (item.explain or {}).items())
        score = [f"{item.score:.2f}" + (f" ({parts})" if parts else "")] if scored else []
        return [*score, namespace_text(item.namespace), item.key, ago(item.at, now), _brief(item)]

    headers = ("namespace", "key", "learned", "value")
    cli.listing(found, ("score", *headers) if scored else headers, row, empty=empty, document=_document)


def _document(item: Item) -> dict[str, Any]:
    return {**readable(item), "namespace": namespace_text(item.namespace), "labels": list(item.namespace)}


def _brief(item: Item) -> str:
    value = item.value if isinstance(item.value, str) else to_json(readable(item.value))
    return " ".join([f"({item.gone})" if item.gone else shorten(value, VALUE_WIDTH), *_marks(item)])


def _marks(item: Item) -> list[str]:
    expires = [] if item.expires_at is None else [f"[expires {local(item.expires_at)}]"]
    return [*(["[pinned]"] if item.pinned else []), *expires]
