"""`perdure keys`: create, list, rotate and forget keys of encryption. Never prints a key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from perdure.cli.base import NO, OK, Invocation, argument, command
from perdure.cli.parameters import yes_option
from perdure.cli.text import fields, local, plural
from perdure.errors import NotFound, OpenError, UsageError

if TYPE_CHECKING:
    from perdure.encryption import KeyFile
    from perdure.ops import KeyInfo

ENVIRONMENT = "PERDURE_KEYS"
DEFAULT_TENANT = "default"

keys_option = click.option("--keys", "path", metavar="FILE", help=f"The key file (or ${ENVIRONMENT}).")


def _file(path: str | None) -> KeyFile:
    from perdure.encryption import KeyFile

    path = path or os.environ.get(ENVIRONMENT)
    if not path:
        raise UsageError(f"which key file? Give --keys FILE, or set {ENVIRONMENT}")
    return KeyFile(path)


def _tenant(cli: Invocation) -> str:
    return cli.settings.tenant or DEFAULT_TENANT


def _make(file: KeyFile, tenant: str) -> str:
    try:
        return file.new(tenant)
    except OSError as error:
        raise OpenError(f"the key file {file.path} cannot be written: {error.strerror}") from error


@command("perdure keys new --keys ~/.config/agent-keys.json\nperdure keys new --tenant acme")
@keys_option
@click.pass_obj
def new(cli: Invocation, path: str | None) -> None:
    """Create a key for a tenant.

    The older ones stay in the file. --tenant names the tenant.
    """
    file, tenant = _file(path), _tenant(cli)
    made = _make(file, tenant)
    if cli.out.json:
        cli.out.document({"tenant": tenant, "key": made, "file": str(file.path)})
        return
    cli.out.line((f"key {made} of tenant {tenant} is in {file.path}", "green"))
    cli.out.message("keep a copy of this file apart from the store's backups: without it the data cannot be read")


@command("perdure keys list\nperdure keys list --store agent.db --json", name="list")
@keys_option
@click.pass_obj
def list_(cli: Invocation, path: str | None) -> None:
    """List the keys in the file; with --store, those that the store uses."""
    file, out = _file(path), cli.out
    rows = [
        {"tenant": tenant, "key": key, "made": made, "current": at == 0}
        for tenant, entries in sorted(file.tenants().items())
        for at, (key, made) in enumerate(entries)
        if cli.settings.tenant in (None, tenant)
    ]
    used: list[KeyInfo] = []
    if cli.settings.store is not None:
        with cli.open(keys=file) as store:
            used = store.ops.list_keys()
    if out.json:
        out.document({"file": str(file.path), "keys": rows, "store": [fields(info) for info in used]})
        return
    out.table(
        ("tenant", "key", "made", ""),
        [
            [
                (str(row["tenant"]), "bold"),
                (str(row["key"]), ""),
                (str(row["made"]), "dim"),
                ("in use" if row["current"] else "", ""),
            ]
            for row in rows
        ],
    )
    for info in used:
        state = "in use" if info.current else "older than the key in use: `perdure keys rotate`"
        given = "" if info.given else "not in the key file"
        out.line(("store", "dim"), (info.id, ""), (f"since {local(info.since)}", "dim"), (state, ""), (given, "red"))


@command("perdure keys rotate --store agent.db\nperdure keys rotate --new --store agent.db")
@keys_option
@click.option("--new", "make", is_flag=True, help="Create a new key first.")
@click.pass_obj
def rotate(cli: Invocation, path: str | None, make: bool) -> None:
    """Wrap the tenant's data key with the newest key: at once, while others work."""
    file, out = _file(path), cli.out
    if make:
        _make(file, _tenant(cli))
    with cli.open(keys=file) as store:
        done = store.ops.rotate_keys()
    if out.json:
        out.document(fields(done))
    elif done.previous is None:
        out.line((f"key {done.key} is in use already", "green"))
    else:
        out.line((f"the data key is wrapped with key {done.key} now", "green"))
        out.message(
            f"the store does not need key {done.previous} any more, older backups do: "
            "`perdure keys remove ID` removes it"
        )


@command("perdure keys remove 3f2a9c0b1d4e5f60 --store agent.db")
@argument("key", "KEY", "The key's id, as `perdure keys list` shows it.")
@keys_option
@click.option("--force", is_flag=True, help="Also a key that the store needs, or without a store.")
@click.pass_obj
def remove(cli: Invocation, key: str, path: str | None, force: bool) -> None:
    """Remove an old key.

    Refused while the store needs it: `perdure keys rotate` first, or --force.
    """
    file, tenant = _file(path), _tenant(cli)
    if key not in [known for known, _ in file.tenants().get(tenant, [])]:
        raise NotFound(f"tenant {tenant!r} has no key {key} in {file.path}: `perdure keys list` shows them")
    if not force:
        with cli.open(keys=file) as store:
            found = [info for info in store.ops.list_keys() if info.id == key]
        if found:
            raise UsageError(
                f"the data key is wrapped with key {key}, and the data could never be read again: run "
                "`perdure keys rotate` first (--force removes it all the same)"
            )
    file.remove(tenant, key)
    cli.out.result({"tenant": tenant, "removed": key}, f"key {key} of tenant {tenant} is removed from {file.path}")


@command("perdure keys forget --tenant acme\nperdure keys forget --tenant acme --yes --json")
@keys_option
@yes_option
@click.pass_obj
def forget(cli: Invocation, path: str | None, yes: bool) -> int:
    """Remove all keys of a tenant: its data can never be read again.

    --tenant names the tenant.
    """
    file, tenant = _file(path), _tenant(cli)
    if not file.tenants().get(tenant):
        raise NotFound(f"tenant {tenant!r} has no key in {file.path}: `perdure keys list` shows which tenants have")
    question = f"Forget all keys of tenant {tenant!r}? Its data can never be read again, not from a backup either."
    if not cli.confirmed(question, yes=yes):
        return NO
    gone = file.forget(tenant)
    counted = f"{plural(len(gone), 'key')} forgotten"
    cli.out.result({"tenant": tenant, "forgotten": gone}, f"tenant {tenant} is unreadable from now on: {counted}")
    cli.out.message(
        "processes that use this file stop within a second; copies of it still open the data: remove the keys there"
    )
    return OK
