"""The teams, and of one its members with their boxes, its dead letters, and the messages under way in a snapshot."""

from __future__ import annotations

import asyncio
from typing import Any

from markupsafe import Markup

from perdure.errors import NotFound
from perdure.inspector.actions import Confirmation, Fields, value_in
from perdure.inspector.values import pick
from perdure.inspector.view import PageView
from perdure.teams import DeadLetter, MemberInfo

_LETTERS_MAX, _CUTS_MAX, _FLIGHT_MAX = 100, 20, 100


async def teams(view: PageView) -> dict[str, Any]:
    """Return the teams, the oldest first."""
    return {"teams": [pick(one, "name members waiting dead created_at") for one in await view.store.ateams()]}


async def team(view: PageView) -> dict[str, Any]:
    """Return the members, the dead letters and the snapshots of a team."""
    handle, cut = view.store.team(view.params["name"]), view.query.get("cut")
    members, letters, snapshots, drawing = await asyncio.gather(
        handle.amembers(), handle.adead(), view.store.asnapshots(), handle.adiagram(cut)
    )
    flight = [] if cut is None else await (await handle.aget_snapshot(cut)).ain_flight(raw=True)
    return {
        "name": handle.name,
        "members": [_member(handle.name, one) for one in members],
        "letters": [
            pick(one, "member key error sender sent_at died_at") | {"message": view.value(one.message)}
            for one in letters[:_LETTERS_MAX]
        ],
        "letters_more": max(0, len(letters) - _LETTERS_MAX),
        "cuts": [pick(one, "name taken_at") for one in snapshots[:_CUTS_MAX]],
        "cut": cut,
        "drawing": Markup(drawing),  # its texts are escaped
        "in_flight": [
            pick(one, "sender receiver sent_turn at") | {"message": view.value(one.message)}
            for one in flight[:_FLIGHT_MAX]
        ],
        "in_flight_more": max(0, len(flight) - _FLIGHT_MAX),
    }


def _member(team: str, one: MemberInfo) -> dict[str, Any]:
    about = {"run": f"{team}/{one.name}", "waits_for": one.waiting_for.shown if one.waiting_for else ""}
    return pick(one, "name function status turn waiting dead failures joined_at has_left") | about


# --- actions


async def _letter(view: PageView, fields: Fields) -> DeadLetter:
    for one in await view.store.team(fields["team"]).adead(fields["member"]):
        if one.key == fields["key"]:
            return one
    raise NotFound(f"{fields['key']!r} is no dead letter of {fields['member']!r} any more")


async def resend_letter(view: PageView, fields: Fields) -> Confirmation:
    """Send a dead letter once more, as it was or with another content."""
    letter, text = await _letter(view, fields), fields.get("message")

    async def do() -> str:
        await letter.aresend(value_in(text) if text else None, who=view.who)
        return f"Sent again to {letter.member}."

    said = f"It goes to the end of the box of {letter.member}. Its effects get new keys: those of before were undone."
    command = view.signed("team dead", fields["team"], resend=letter.key, message=text or None)
    return Confirmation(f"Send {letter.key[:12]} again?", said, "Send again", (command,), do)


async def drop_letter(view: PageView, fields: Fields) -> Confirmation:
    """Give a dead letter up."""
    letter = await _letter(view, fields)

    async def do() -> str:
        await letter.adrop(who=view.who)
        return f"Gave up {letter.key[:12]}."

    command = view.signed("team dead", fields["team"], drop=letter.key)
    text = f"{letter.member} never handles it."
    return Confirmation(f"Give {letter.key[:12]} up?", text, "Give up", (command,), do, is_danger=True)


async def send_member(view: PageView, fields: Fields) -> Confirmation:
    """Send a message to a member."""
    team, member, text = fields["team"], fields["member"], fields["message"]

    async def do() -> str:
        await view.store.team(team).asend(member, value_in(text), who=view.who)
        return f"Sent to {team}/{member}."

    command = view.signed("team send", team, member, text)
    return Confirmation(f"Send a message to {member}?", f"{text}: {member} gets it once.", "Send", (command,), do)


ACTIONS = (resend_letter, drop_letter, send_member)
