"""`perdure keys`: make, list, rotate and forget keys of encryption. Never prints a key."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

import perdure
from perdure.cli.command import Command
from perdure.cli.opening import open_existing
from perdure.cli.readable import local, moment, plural
from perdure.cli.render import Output
from perdure.errors import NotFound, OpenError, UsageError
from perdure.threads.store import DEFAULT_TENANT

if TYPE_CHECKING:
    from perdure.ops.keys import KeyInfo, Rotated
    from perdure.storage.keyring import KeyFile

OK, NO = 0, 1
ENVIRONMENT = "PERDURE_KEYS"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="ACTION",
        choices=("new", "list", "encrypt", "rotate", "remove", "forget"),
        help="new, list, encrypt, rotate, remove, forget",
    )
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="new, forget: the tenant (or --tenant); remove: a key's id"
    )
    parser.add_argument("--keys", metavar="FILE", help=f"the key file (or ${ENVIRONMENT})")
    parser.add_argument("--new", action="store_true", help="rotate: make a new key first")
    parser.add_argument(
        "--full", action="store_true", help="encrypt, PostgreSQL: rewrite the tables; nobody can use them then"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where there is no terminal")
    parser.add_argument(
        "--force", action="store_true", help="remove: also a key that data may be encrypted with, or without a store"
    )


def keys(args: Namespace, _store: perdure.Store | None, out: Output) -> int:
    actions = {"new": _new, "list": _list, "encrypt": _renew, "rotate": _renew, "remove": _remove, "forget": _forget}
    if args.name is not None and args.what not in ("new", "forget", "remove"):
        raise UsageError(f"`perdure keys {args.what}` takes no name; the tenant is --tenant")
    if args.new and args.what != "rotate":
        raise UsageError("--new goes with `perdure keys rotate`")
    if args.full and args.what != "encrypt":
        raise UsageError("--full goes with `perdure keys encrypt`")
    if args.force and args.what != "remove":
        raise UsageError("--force goes with `perdure keys remove`")
    return actions[args.what](args, _file(args), out)


def _file(args: Namespace) -> KeyFile:
    from perdure.storage.keyring import KeyFile

    path = args.keys or os.environ.get(ENVIRONMENT)
    if not path:
        raise UsageError(f"which key file? Give --keys FILE, or set {ENVIRONMENT}")
    return KeyFile(path)


def _tenant(args: Namespace) -> str:
    if args.name is not None and args.tenant is not None and args.name != args.tenant:
        raise UsageError(f"which tenant: {args.name!r} or {args.tenant!r}?")
    return args.name or args.tenant or DEFAULT_TENANT


def _open(args: Namespace, file: KeyFile) -> perdure.Store:
    return open_existing(args, keys=file)


def _new(args: Namespace, file: KeyFile, out: Output) -> int:
    tenant = _tenant(args)
    made = _make(file, tenant)
    if out.json:
        out.document({"tenant": tenant, "key": made, "file": str(file.path)})
        return OK
    out.line((f"key {made} of tenant {tenant} is in {file.path}", "green"))
    out.message("keep a copy of this file apart from the store's backups: without it the data cannot be read")
    return OK


def _make(file: KeyFile, tenant: str) -> str:
    try:
        return file.new(tenant)
    except OSError as error:
        raise OpenError(f"the key file {file.path} cannot be written: {error.strerror}") from error


def _list(args: Namespace, file: KeyFile, out: Output) -> int:
    rows = [
        (tenant, key, made, at == 0)
        for tenant, entries in sorted(file.tenants().items())
        for at, (key, made) in enumerate(entries)
        if args.tenant in (None, tenant)
    ]
    used: list[KeyInfo] = []
    if args.store is not None:
        with _open(args, file) as store:
            used = store.ops.list_keys()
    if out.json:
        keys = [dict(zip(("tenant", "key", "made", "current"), row, strict=True)) for row in rows]
        out.document({"file": str(file.path), "keys": keys, "store": [_info(info) for info in used]})
        return OK
    out.table(
        ("tenant", "key", "made", ""),
        [
            [(tenant, "bold"), (key, ""), (made, "dim"), ("in use" if current else "", "")]
            for tenant, key, made, current in rows
        ],
    )
    for info in used:
        state = "in use" if info.current else "may still be in use" if info.retired_at is None else "retired"
        given = "" if info.given else "not in the key file"
        out.line(("store", "dim"), (info.id, ""), (f"since {local(info.since)}", "dim"), (state, ""), (given, "red"))
    return OK


def _info(info: KeyInfo) -> dict[str, object]:
    return {
        "key": info.id,
        "since": moment(info.since),
        "retired_at": None if info.retired_at is None else moment(info.retired_at),
        "current": info.current,
        "given": info.given,
    }


def _renew(args: Namespace, file: KeyFile, out: Output) -> int:
    if args.what == "rotate" and args.new:
        _make(file, args.tenant or DEFAULT_TENANT)
    with _open(args, file) as store, out.progress("encrypting") as progress:
        if args.what == "encrypt":
            done = store.ops.encrypt(full=args.full, progress=progress)
        else:
            done = store.ops.rotate_keys(progress=progress)
    if out.json:
        out.document(_rotated(done))
    else:
        out.line((f"{plural(done.rows, 'row')} encrypted with key {done.key}", "green"))
        for key in done.retired:
            out.line((f"nothing is encrypted with key {key} any more: `perdure keys remove {key}`", ""))
        for key in done.waiting:
            out.message(
                f"a running process may still use key {key}: keep it, and run `perdure keys rotate` in a minute"
            )
        if done.may_remain:
            out.line(("what may still hold it in the clear:", ""))
            for told in done.may_remain:
                out.line((f"  - {told}", "dim"))
        if done.unreadable:
            out.message(f"{plural(done.unreadable, 'row')} could not be opened: run `perdure verify`")
    return NO if done.unreadable else OK


def _rotated(done: Rotated) -> dict[str, object]:
    return {
        "key": done.key,
        "rows": done.rows,
        "retired": list(done.retired),
        "waiting": list(done.waiting),
        "unreadable": done.unreadable,
        "may_remain": list(done.may_remain),
    }


def _remove(args: Namespace, file: KeyFile, out: Output) -> int:
    if args.name is None:
        raise UsageError("which key? `perdure keys list` shows their ids")
    tenant = args.tenant or DEFAULT_TENANT
    if args.name not in [key for key, _ in file.tenants().get(tenant, [])]:
        raise NotFound(f"tenant {tenant!r} has no key {args.name} in {file.path}: `perdure keys list` shows them")
    if not args.force:  # --yes does not do: without the key the data is lost for good
        with _open(args, file) as store:
            found = [info for info in store.ops.list_keys() if info.id == args.name]
        if found and (found[0].current or found[0].retired_at is None):
            raise UsageError(
                f"data may still be encrypted with key {args.name}, and could never be read again: run "
                "`perdure keys rotate` first, until it says that nothing is (--force removes it all the same)"
            )
    file.remove(tenant, args.name)
    if out.json:
        out.document({"tenant": tenant, "removed": args.name})
    else:
        out.line((f"key {args.name} of tenant {tenant} is gone from {file.path}", "green"))
    return OK


def _forget(args: Namespace, file: KeyFile, out: Output) -> int:
    tenant = _tenant(args)
    if not file.tenants().get(tenant):
        raise NotFound(f"tenant {tenant!r} has no key in {file.path}: `perdure keys list` shows who has")
    question = f"Forget all keys of tenant {tenant!r}? Nobody will ever read its data again, not from a backup either."
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError("keys forget removes for good: give --yes when there is no terminal to ask on")
        if not out.confirm(question):
            out.message("nothing was removed")
            return NO
    gone = file.forget(tenant)
    if out.json:
        out.document({"tenant": tenant, "forgotten": gone})
    else:
        out.line((f"tenant {tenant} is unreadable from now on: {plural(len(gone), 'key')} forgotten", "green"))
        out.message(
            "processes that use this file stop within a second; copies of it still open the data: remove the keys there"
        )
    return OK


KEYS = Command(
    "make, list, rotate and forget keys of encryption",
    "A key file holds a key for each\ntenant; only its owner may read it. Name it with --keys or $PERDURE_KEYS; with "
    "the variable set, all\ncommands open encrypted stores.\n\n"
    "new      make a key for a tenant; the older ones still open what they encrypted\n"
    "list     the keys in the file; with --store, those that the store uses\n"
    "encrypt  encrypt a store that was used without keys; stop its users first. Says what may still hold it in\n"
    "         the clear; with --full PostgreSQL rewrites its tables\n"
    "rotate   encrypt everything with the newest key, while others work\n"
    "remove   remove an older key that nothing is encrypted with any more; refused, also with --yes, while\n"
    "         the store says that data may be encrypted with it: then `rotate` first, or --force\n"
    "forget   remove all keys of a tenant: its data can never be read again",
    "  perdure keys new --keys ~/.config/agent-keys.json\n  perdure keys encrypt --store agent.db\n"
    "  perdure keys rotate --new --store agent.db",
    arguments,
    keys,
    opens=False,
    wants_store=False,
)
