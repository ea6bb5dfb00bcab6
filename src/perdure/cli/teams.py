"""The commands about teams: list, show, send, dead, snapshot, restore, rewind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure.cli.base import Invocation, command, root, team_group, with_store
from perdure.cli.parameters import parse_value, who_option
from perdure.cli.text import local, plural, readable, to_json
from perdure.errors import NotFound, UsageError

if TYPE_CHECKING:
    from perdure import Store
    from perdure.teams import DeadLetter, PastEffect, Team

_keys_option = click.option("--keys", type=click.Choice(["same", "new"]), help="Also go back over effects; see above.")
_dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")


@command(root, "Runs", "perdure teams\nperdure teams --json | jq .name", name="teams")
@with_store
def list_teams(cli: Invocation, store: Store) -> None:
    """List the teams, the oldest first.

    --json prints a line per team.
    """
    cli.listing(
        store.teams(),
        ("team", "members", "waiting", "dead", "created"),
        lambda one: [one.name, f"{one.members:,}", f"{one.waiting:,}", f"{one.dead:,}", local(one.created_at)],
        empty="there are no teams; store.team(NAME) makes one",
        right=(1, 2, 3),
    )


@command(team_group, "Commands", "perdure team show research\nperdure team show research --json | jq .waiting")
@click.argument("team")
@with_store
def show(cli: Invocation, store: Store, team: str) -> None:
    """List the members of a team: status, turns, and how many messages wait, are dead or failed.

    `perdure run show TEAM/MEMBER` shows the turn that a member is in, `perdure show run:TEAM/MEMBER` its state.
    --json prints a line per member.
    """
    cli.listing(
        store.team(team).members(),
        ("member", "status", "turn", "waiting", "dead", "failures", "waits for"),
        lambda one: [
            one.name,
            one.status,
            f"{one.turn:,}",
            f"{one.waiting:,}",
            f"{one.dead:,}",
            f"{one.failures:,}",
            one.waiting_for.shown if one.waiting_for is not None else "",
        ],
        empty="the team has no members",
        right=(2, 3, 4, 5),
    )


@command(
    team_group,
    "Commands",
    'perdure team send research researcher \'{"topic": "tides"}\'\n'
    "perdure team send research writer stop --key order-7",
)
@click.argument("team")
@click.argument("member")
@click.argument("value")
@click.option("--key", metavar="KEY", help="Send a message with this key only once.")
@who_option
@with_store
def send(cli: Invocation, store: Store, team: str, member: str, value: str, key: str | None, who: str) -> None:
    """Send a message to a member of a team.

    A worker that has the agent's code handles it. Refused if as many messages wait as the member's capacity allows.
    """
    store.team(team).send(member, parse_value(value), key=key, who=who)
    cli.result(f"sent to {team}/{member}", team=team, member=member, sent=True)


@command(
    team_group,
    "Commands",
    "perdure team dead research\n"
    "perdure team dead research --member writer --json | jq .message\n"
    'perdure team dead research --resend 524e570cc9dd --message \'{"topic": "tides"}\'',
)
@click.argument("team")
@click.option("--member", metavar="NAME", help="Only letters of this member.")
@click.option("--resend", metavar="KEY", help="Send the letter with this key (its beginning is enough) once more.")
@click.option("--message", metavar="VALUE", help="With --resend: send this instead of the old content.")
@click.option("--drop", metavar="KEY", help="Give the letter with this key up.")
@who_option
@with_store
def dead(
    cli: Invocation,
    store: Store,
    team: str,
    member: str | None,
    resend: str | None,
    message: str | None,
    drop: str | None,
    who: str,
) -> None:
    """List the dead letters of a team: messages that failed for good, and why. Resend one, or give it up.

    The effects of the failed attempts were undone. A letter that is sent again goes to the end of its member's box.
    --json prints a line per letter.
    """
    if (resend is not None and drop is not None) or (message is not None and resend is None):
        raise UsageError("give --resend KEY, perhaps with --message VALUE, or --drop KEY")
    letters = store.team(team).dead(member)
    if resend is not None:
        letter = _with_key(letters, resend)
        letter.resend(None if message is None else parse_value(message), who=who)
        return cli.result(f"sent again to {team}/{letter.member}", team=team, member=letter.member, key=letter.key)
    if drop is not None:
        letter = _with_key(letters, drop)
        letter.drop(who=who)
        return cli.result(f"gave up {letter.key}", team=team, member=letter.member, key=letter.key)
    return cli.listing(
        letters,
        ("member", "key", "died", "error", "message"),
        lambda one: [
            one.member,
            one.key[:12],
            local(one.died_at) if one.died_at else "",
            one.error[:60],
            to_json(readable(one.message))[:80],
        ],
        empty="no dead letters",
        document=_letter,
    )


def _with_key(letters: list[DeadLetter], key: str) -> DeadLetter:
    matching = [letter for letter in letters if letter.key.startswith(key)]
    if len(matching) != 1:
        raise NotFound(
            f"{plural(len(matching), 'dead letter')} with a key that begins with {key!r}: `perdure team dead`"
        )
    return matching[0]


def _letter(letter: DeadLetter) -> dict[str, Any]:
    names = ("member", "key", "message", "error", "sender", "sent_at", "died_at")
    return {name: readable(getattr(letter, name)) for name in names}


@command(team_group, "Commands", "perdure team snapshot research before-deploy\nperdure team snapshot research")
@click.argument("team")
@click.argument("name", required=False)
@click.option("--note", metavar="TEXT", help="Why you take it; `perdure snapshots` shows the note.")
@who_option
@with_store
def snapshot(cli: Invocation, store: Store, team: str, name: str | None, note: str | None, who: str) -> None:
    """Cut through a team while it works, and list the messages that were in flight.

    It is a snapshot of the whole store, which takes milliseconds and stops no agent: `perdure snapshot` has more
    commands for it.
    """
    handle: Team = store.team(team)
    handle.members()  # raises NotFound before a snapshot is taken
    snap = handle.snapshot(name, note=note, who=who)
    flying = snap.in_flight(raw=True)
    if cli.json:
        return cli.document(name=snap.name, taken_at=snap.taken_at, team=team, in_flight=readable(flying))
    cli.line(f"took snapshot {snap.name}; {plural(len(flying), 'message')} in flight")
    return cli.lines_below(
        *(f"{one.sender or 'outside'} to {one.receiver}: {to_json(readable(one.message))[:80]}" for one in flying)
    )


@command(
    team_group,
    "Commands",
    "perdure team restore research before-deploy --dry-run\nperdure team restore research before-deploy",
)
@click.argument("team")
@click.argument("name")
@_keys_option
@_dry_run_option
@who_option
@with_store
def restore(cli: Invocation, store: Store, team: str, name: str, keys: Any, dry_run: bool, who: str) -> None:
    """Take all members of a team back to a snapshot, in one transaction, while they work.

    Their states, boxes, turns and child runs become what they were; members that joined since are removed. Refused if
    effects ran since: they happened, whatever the team forgets. --dry-run lists them. To go back nevertheless, say with
    which idempotency keys they may run again: --keys same or --keys new. A snapshot is taken first.
    """
    done = store.team(team).restore(name, keys=keys, dry_run=dry_run, who=who)
    undo = None if dry_run else done.undo.name
    if cli.json:
        return cli.document(
            team=team, snapshot=done.snapshot, members=list(done.members), removed=list(done.removed),
            effects=readable(list(done.effects)), undo=undo, dry_run=dry_run,
        )  # fmt: skip
    _print_effects(cli, done.effects)
    for member in done.removed:
        cli.line(f"remove {member}")
    back = f"{plural(len(done.members), 'member')} of {team}"
    if dry_run:
        return cli.message(f"dry run: {back} would go back to {name}; nothing has changed")
    cli.line(f"{back} went back to {name}")
    return cli.message(f"to undo it: perdure team restore {team} {undo} --keys same")


@command(
    team_group,
    "Commands",
    "perdure team rewind research writer --turn 41 --dry-run\nperdure team rewind research writer --turn 41",
)
@click.argument("team")
@click.argument("member")
@click.option("--turn", metavar="N", type=int, required=True, help="The last turn that stays; 0 for none.")
@_keys_option
@_dry_run_option
@who_option
@with_store
def rewind(
    cli: Invocation, store: Store, team: str, member: str, turn: int, keys: Any, dry_run: bool, who: str
) -> None:
    """Take a member back to an earlier turn, with the members that must fall with it, and say why they do.

    A member falls if it took a message that is now unsent. Messages that undone turns took wait again. Refused if
    effects ran in these turns, unless you say with which idempotency keys they may run again: --keys same or --keys
    new. Needs no snapshot.
    """
    done = store.team(team).rewind(member, turn=turn, keys=keys, dry_run=dry_run, who=who)
    if cli.json:
        falls = [
            {"member": one.member, "from": one.from_turn, "to": one.to_turn, "why": str(one)} for one in done.falls
        ]
        return cli.document(
            team=team, falls=falls, returned=done.returned, withdrawn=done.withdrawn,
            effects=readable(list(done.effects)), dry_run=dry_run,
        )  # fmt: skip
    for fall in done.falls:
        cli.line(str(fall))
    _print_effects(cli, done.effects)
    if not done.falls:
        return cli.message(f"{member} is at turn {turn}: nothing has changed")
    counts = f"{plural(done.returned, 'message')} wait again, {done.withdrawn:,} were never sent now"
    return cli.message(f"dry run: nothing has changed; {counts}" if dry_run else counts)


def _print_effects(cli: Invocation, effects: tuple[PastEffect, ...]) -> None:
    for effect in effects:
        cli.line(f"effect: {effect}")
