"""The commands about encryption keys: keys, key new, rotate, remove, forget. None prints a key."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from perdure.cli.base import Invocation, command, key_group, root
from perdure.cli.parameters import yes_option
from perdure.cli.text import plural
from perdure.errors import NotFound, OpenError, UsageError

if TYPE_CHECKING:
    from perdure.encryption import KeyFile

ENVIRONMENT = "PERDURE_KEYS"
DEFAULT_TENANT = "default"

keys_option = click.option("--keys", "path", metavar="FILE", help=f"The key file (or ${ENVIRONMENT}).")


def _file(path: str | None) -> KeyFile:
    from perdure.encryption import KeyFile

    path = path or os.environ.get(ENVIRONMENT)
    if not path:
        raise UsageError(f"which key file? Give --keys FILE, or set {ENVIRONMENT}")
    return KeyFile(path)


def _make(file: KeyFile, tenant: str) -> str:
    try:
        return file.new(tenant)
    except OSError as error:
        raise OpenError(f"the key file {file.path} cannot be written: {error.strerror}") from error


@command(key_group, "Commands", "perdure key new --keys ~/.config/agent-keys.json\nperdure key new --tenant acme")
@keys_option
@click.pass_obj
def new(cli: Invocation, path: str | None) -> None:
    """Create a key for a tenant (--tenant). Older keys stay in the file."""
    file, tenant = _file(path), cli.tenant or DEFAULT_TENANT
    key = _make(file, tenant)
    text = f"key {key} of tenant {tenant} is in {file.path}"
    cli.result(text, tenant=tenant, key=key, file=str(file.path))
    if not cli.json:
        cli.message("keep a copy of this file apart from the store's backups: without it the data cannot be read")


@command(root, "Stores", "perdure keys\nperdure keys --keys ~/.config/agent-keys.json", name="keys")
@keys_option
@click.pass_obj
def list_keys(cli: Invocation, path: str | None) -> None:
    """List the keys of the key file, or those of one tenant (--tenant).

    --json prints a line per key.
    """
    file = _file(path)
    rows = [
        {"tenant": tenant, "key": key, "made": created, "current": at == 0}
        for tenant, entries in sorted(file.tenants().items())
        for at, (key, created) in enumerate(entries)
        if cli.tenant in (None, tenant)
    ]
    cli.listing(
        rows,
        ("tenant", "key", "made", ""),
        lambda row: [str(row["tenant"]), str(row["key"]), str(row["made"]), "in use" if row["current"] else ""],
        empty=f"no keys in {file.path}",
    )


@command(key_group, "Commands", "perdure key rotate --store agent.db\nperdure key rotate --new --store agent.db")
@keys_option
@click.option("--new", "make", is_flag=True, help="Create a new key first.")
@click.pass_obj
def rotate(cli: Invocation, path: str | None, make: bool) -> None:
    """Wrap the tenant's data key with its newest key. Quick, and safe while the store is in use."""
    file = _file(path)
    if make:
        _make(file, cli.tenant or DEFAULT_TENANT)
    with cli.open(keys=file) as store:
        done = store.ops.rotate_keys()
    if done.previous is None:
        return cli.result(f"key {done.key} is in use already", done)
    cli.result(f"the data key is wrapped with key {done.key} now", done)
    if not cli.json:
        cli.message(
            f"the store no longer needs key {done.previous}, but older backups do: `perdure key remove ID` removes it"
        )
    return None


@command(key_group, "Commands", "perdure key remove 3f2a9c0b1d4e5f60 --store agent.db")
@click.argument("key")
@keys_option
@click.option("--force", is_flag=True, help="Remove it even if the store needs it, and without asking a store.")
@click.pass_obj
def remove(cli: Invocation, key: str, path: str | None, force: bool) -> None:
    """Remove an old key by its id.

    Refused while the store needs it: run `perdure key rotate` first, or give --force.
    """
    file, tenant = _file(path), cli.tenant or DEFAULT_TENANT
    if key not in [known for known, _ in file.tenants().get(tenant, [])]:
        raise NotFound(f"tenant {tenant!r} has no key {key} in {file.path}: `perdure keys` shows them")
    if not force:
        with cli.open(keys=file) as store:
            in_use = [info for info in store.ops.list_keys() if info.id == key]
        if in_use:
            raise UsageError(
                f"the store needs key {key}: without it the data could never be read again. Run "
                "`perdure key rotate` first (--force removes it all the same)"
            )
    file.remove(tenant, key)
    cli.result(f"key {key} of tenant {tenant} is removed from {file.path}", tenant=tenant, removed=key)


@command(key_group, "Commands", "perdure key forget --tenant acme --yes")
@keys_option
@yes_option
@click.pass_obj
def forget(cli: Invocation, path: str | None, yes: bool) -> None:
    """Remove all keys of a tenant (--tenant): its data can never be read again."""
    file, tenant = _file(path), cli.tenant or DEFAULT_TENANT
    if not file.tenants().get(tenant):
        raise NotFound(f"tenant {tenant!r} has no key in {file.path}: `perdure keys` shows which tenants have")
    question = f"Forget all keys of tenant {tenant!r}? Its data can never be read again, not from a backup either."
    cli.confirm(question, yes=yes)
    gone = file.forget(tenant)
    text = f"tenant {tenant} is unreadable from now on: {plural(len(gone), 'key')} forgotten"
    cli.result(text, tenant=tenant, forgotten=gone)
