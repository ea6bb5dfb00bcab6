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
    as_of_option,
    duration,
    full_option,
    limit_option,
    namespace,
    namespace_text,
    pair,
    parse_value,
    who_option,
    yes_option,
)
from perdure.cli.retention import print_erased
from perdure.cli.text import ago, local, plural, readable, shorten, size, to_json
from perdure.errors import NotFound, UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.memory import Item, Memory

VALUE_WIDTH = 100
KEPT = "The history keeps the old values."
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
    help="The embedder of your application: local, SERVICE:MODEL, or APP:FUNCTION (or $PERDURE_EMBEDDER).",
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
    """List the items of a namespace and of the namespaces below it, the newest first.

    --json prints a line per item.
    """
    listed = _raw(store, labels).list(where=dict(where) or None, kind=kind, limit=limit or None)
    empty = "no items match" if where or kind else "no items there; `perdure memory namespaces` lists the namespaces"
    _print_items(cli, listed, empty=empty)
    if limit and len(listed) == limit and not cli.json:
        cli.message(f"the newest {limit}; there may be more: --limit 0 lists all")


@command(
    memory_group,
    "Inspect",
    "perdure memory get users/alice theme\nperdure memory get users/alice theme --history\n"
    "perdure memory get users/alice theme --as-of 2d --json | jq .value",
)
@namespace_argument
@click.argument("key")
@click.option("--history", is_flag=True, help="Show all its versions, the oldest first.")
@as_of_option
@with_store
def get(cli: Invocation, store: Store, labels: Labels, key: str, history: bool, as_of: datetime | None) -> None:
    """Show an item, or with --history all its versions.

    Exits with 3 if there is no such item. A version "cap", "expired" or "deleted" shows why the item was removed.
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
    raise NotFound(f"there is no item {key!r} in {place}; `perdure memory items {place}` lists its items")


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
@click.option("--relevant", is_flag=True, help="Leave out items that are not about the query.")
@click.option("--explain", is_flag=True, help="Show the parts of each score.")
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
    """Find the items of a namespace, and of the namespaces below it, that fit a query best.

    Searches by words, and with --embedder also by meaning. Needs the extra `search`. --json prints a line per item.
    """
    with open_with(cli, embedder) as store:
        memory = _raw(store, labels)
        matches = memory.search(
            query, limit=limit, where=dict(where) or None, kind=kind, relevant=relevant, explain=explain
        )
        empty = "nothing was found" if matches else _nothing(memory, labels, embedder)
    _print_items(cli, matches, empty=empty, scored=True)


@command(
    memory_group,
    "Control",
    'perdure memory put users/alice theme \'{"fact": "Alice prefers dark mode"}\' --pin\n'
    'perdure memory put users/alice visit "Alice is in Lisbon" --kind episodic --ttl 7d',
)
@namespace_argument
@click.argument("key")
@click.argument("value")
@click.option("--text", metavar="TEXT", help="The text that searches match (default: every text in the value).")
@click.option("--kind", metavar="KIND", default="semantic", help="Its kind (default: semantic).")
@click.option("--pin", is_flag=True, help="Pin it: no cap and no expiry removes it.")
@click.option("--ttl", metavar="TIME", type=duration, help="It expires after 45s, 30m, 2h, 30d or 8w.")
@click.option("--expect", metavar="N", type=COUNT, help="Store it only if this is the current version (0: no item).")
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
    """Store a value under a key. The old value stays in the history."""
    with open_with(cli, embedder) as store:
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


@command(memory_group, "Control", "perdure memory pin users/alice theme")
@namespace_argument
@click.argument("key")
@who_option
@with_store
def pin(cli: Invocation, store: Store, labels: Labels, key: str, who: str) -> None:
    """Pin an item: no cap and no age limit removes it."""
    item = _raw(store, labels).pin(key, who=who)
    cli.result(f"{namespace_text(labels)} {key}: pinned, version {item.version}", _document(item))


@command(memory_group, "Control", "perdure memory unpin users/alice theme")
@namespace_argument
@click.argument("key")
@who_option
@with_store
def unpin(cli: Invocation, store: Store, labels: Labels, key: str, who: str) -> None:
    """Unpin an item: caps and age limits apply to it again."""
    item = _raw(store, labels).unpin(key, who=who)
    cli.result(f"{namespace_text(labels)} {key}: not pinned, version {item.version}", _document(item))


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
@click.option("--all", "everything", is_flag=True, help="All items of the namespace and of those below it.")
@who_option
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
    who: str,
    yes: bool,
) -> None:
    """Delete the items with these keys, the items that match, or --all.

    Their history stays as long as the retention policy says. `perdure memory erase` removes it too.
    """
    if bool(keys) + bool(where or kind) + everything != 1:
        raise UsageError("give one of these: keys, a match (--where, --kind), or --all")
    memory, place = _raw(store, labels), namespace_text(labels)
    if keys:
        cli.confirm(f"Delete {', '.join(map(repr, keys))} of {place}?", yes=yes, after=KEPT)
        count = sum(memory.delete(key, who=who) for key in keys)
    else:
        which = "all" if everything else "the matching"
        cli.confirm(f"Delete {which} items of {place} and of the namespaces below it?", yes=yes, after=KEPT)
        count = memory.forget(dict(where), kind=kind)
    if keys and not count:
        raise NotFound(f"{place} has no such item: nothing was deleted")
    cli.result(f"{plural(count, 'item')} deleted", namespace=place, deleted=count)


@command(
    memory_group,
    "Remove and move",
    "perdure memory merge team --from postgresql://app@us/app\nperdure memory merge team --from other.db --both",
)
@namespace_argument
@click.option("--from", "url", metavar="URL", required=True, help="The other store.")
@click.option("--both", is_flag=True, help="Merge into the other store too: then both hold the same.")
@with_store
def merge(cli: Invocation, store: Store, labels: Labels, url: str, both: bool) -> None:
    """Merge the items of a namespace of another store into this one.

    Only items that merge are brought: counters, sets, registers and texts. Others stay where they are.
    """
    with cli.open(url) as other:
        here, there = store.memory(*labels), other.memory(*labels)
        changed, back = here.merge(there), there.merge(here) if both else 0
    said = f"{plural(changed, 'item')} changed" + (f", {plural(back, 'item')} in the other store" if both else "")
    cli.result(said, namespace=namespace_text(labels), changed=changed, changed_there=back)


@command(
    memory_group,
    "Remove and move",
    "perdure memory erase users/alice theme --yes\nperdure memory erase users/alice --yes\n"
    "perdure memory erase --label alice --yes --json",
)
@scope_argument
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--label", metavar="LABEL", help="Every namespace with this label at any place, such as a user.")
@full_option
@yes_option
@with_store
def erase(
    cli: Invocation, store: Store, labels: Labels, keys: tuple[str, ...], label: str | None, full: bool, yes: bool
) -> None:
    """Erase items for good, with their history, from snapshots and the store's own files.

    Erases the items with these keys. Without keys, erases the namespace and those below it, with names and policies.
    """
    memory, place = store.memory(*labels), namespace_text(labels)
    if label is not None and keys:
        raise UsageError("give keys or --label, not both")
    target = (
        ", ".join(map(repr, keys)) or "everything" if label is None else f"every namespace with the label {label!r}"
    )
    cli.confirm(f"Erase {target} in {place}?", yes=yes, after="It cannot be brought back.")
    if label is not None:
        done = [memory.erase_label(label, full=full)]
    elif keys:
        done = [memory.erase(key, full=full) for key in keys]
    else:
        done = [memory.erase_all(full=full)]
    versions = sum(one.versions for one in done)
    if not versions and not done[-1].namespaces:
        raise NotFound(
            f"{place} has no such item, nor does its history"
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

    `embedded` counts the versions that have a vector of --embedder.
    """
    with open_with(cli, embedder) as store:
        usage = store.memory(*labels).stats()
    if cli.json:
        return cli.document(usage)
    return print_fields(cli, usage, {})


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

    A read migrates the item that it returns. This command migrates all items, so that you can remove old migrations.
    After an interruption, run the same command again: it continues.
    """
    from perdure.runs.workers.loading import load_named

    load_named(app)
    with cli.progress("migrating") as progress:
        count = store.memory(*labels).migrate(progress=progress)
    cli.result(f"{plural(count, 'item')} migrated", namespace=namespace_text(labels), migrated=count)


@command(
    root,
    "Memory",
    "perdure mcp agent.db --namespace users/alice\nperdure mcp agent.db --namespace users/alice --read-only",
)
@click.argument("url", metavar="[STORE]", required=False)
@click.option(
    "--namespace", "labels", metavar="NAMESPACE", type=namespace, required=True, help="The namespace to serve."
)
@click.option("--read-only", is_flag=True, help="Offer memory_search only.")
@click.option(
    "--block", "blocks", metavar="NAME", multiple=True, help="Let the model edit this block (may be repeated)."
)
@embedder_option
@click.pass_obj
def mcp(
    cli: Invocation, url: str | None, labels: Labels, read_only: bool, blocks: tuple[str, ...], embedder: str | None
) -> None:
    """Serve the memory of a namespace to a model as an MCP server.

    The server speaks the Model Context Protocol on stdin and stdout. Its tools are memory_search, memory_save and
    memory_forget, and with --block also memory_append and memory_replace. They reach only this namespace of this
    tenant; memory_search also covers the namespaces below it.
    Needs the extra `mcp`.
    """
    from perdure.memory.mcp import serve

    cli.store = url or cli.store
    with open_with(cli, embedder) as store:
        serve(_raw(store, labels), read_only=read_only, blocks=blocks)


def open_with(cli: Invocation, embedder: str | None) -> Store:
    """Open the store with an embedder: "local", "SERVICE:MODEL", or a function of an app."""
    from perdure.memory.embedding_services import NAMES

    if embedder is None or embedder == "local" or embedder.partition(":")[0] in NAMES:
        return cli.open(embedder=embedder)
    from perdure.runs.workers.loading import load_named

    function = load_named(embedder) if ":" in embedder else None
    if not callable(function) and not hasattr(function, "embed_documents"):
        raise UsageError(f"--embedder {embedder} is not an embedder: write local, or a function such as app.py:embed")
    return cli.open(embedder=function)


def _nothing(memory: Memory, labels: Labels, embedder: str | None) -> str:
    """Return the message of an empty search, with the cause if it is known."""
    stats, place = memory.stats(), namespace_text(labels)
    if not stats.items:
        return f"nothing was found: there are no items in {place}; `perdure memory namespaces` lists them"
    if embedder is not None and not stats.embedded:
        run = f"perdure memory reembed {place} --embedder {embedder}"
        return f"nothing was found: no item has a vector of {embedder}; run `{run}`"
    return "nothing was found"


def _raw(store: Store, labels: Labels) -> Memory:
    """Return a namespace that reads values without their classes."""
    return store.memory(*labels, raw=True)


def _print_items(cli: Invocation, listed: list[Item], *, empty: str, scored: bool = False) -> None:
    now = datetime.now(UTC)

    def row(item: Item) -> list[str]:
        said = {
            name: ",".join(part) if name == "matched" else f"{part:.2f}" for name, part in (item.explain or {}).items()
        }
        parts = " ".join(f"{name} {part}" for name, part in said.items() if part)
        score = [f"{item.score:.2f}" + (f" ({parts})" if parts else "")] if scored else []
        return [*score, namespace_text(item.namespace), item.key, ago(item.at, now), _brief(item)]

    headers = ("namespace", "key", "learned", "value")
    cli.listing(listed, ("score", *headers) if scored else headers, row, empty=empty, document=_document)


def _document(item: Item) -> dict[str, Any]:
    return {**readable(item), "namespace": namespace_text(item.namespace), "labels": list(item.namespace)}


def _brief(item: Item) -> str:
    value = item.value if isinstance(item.value, str) else to_json(readable(item.value))
    return " ".join([f"({item.gone})" if item.gone else shorten(value, VALUE_WIDTH), *_marks(item)])


def _marks(item: Item) -> list[str]:
    expires = [] if item.expires_at is None else [f"[expires {local(item.expires_at)}]"]
    return [*(["[pinned]"] if item.pinned else []), *expires]
