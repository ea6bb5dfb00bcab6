"""A space-time diagram as SVG: members are lines, turns boxes, messages arrows, a cut a line through all. Pure.

Turns stand in their causal order, not by the clock: each arrow points to the right. A message that crosses the cut is
in flight in it; one that crosses it backwards is an orphan, which no consistent cut has. The size is bounded: of a
large team the newest turns of the first members are drawn, and the picture says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from html import escape

from perdure.teams.recovery import SentMessage

_LANE, _STEP, _LEFT, _TOP = 56, 24, 150, 34
_MEMBERS_MAX, _TURNS_MAX, _MESSAGES_MAX = 40, 120, 1500
_NAME_MAX = 20  # characters; the whole name is shown on hover
_HOVER_MAX = 200
# Colours follow the page: a theme sets the variables, else they are these.
_COLOURS = {"turn": "#4a78b5", "message": "#777777", "flying": "#d98200", "orphan": "#c62828", "cut": "#1b9e77"}
_HEAD = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>'
)
Turn = tuple[str, int]


def diagram(
    turns: Mapping[str, int],
    messages: Sequence[SentMessage],
    cut: Mapping[str, int] | None = None,
    *,
    title: str = "Team",
) -> str:
    """Return a drawing of a team as the text of an SVG image.

    `turns` has the newest turn of each member, in the order of the lines. `cut` has the turn of each member that is the
    last before the cut, as `RecoveryLine.turns` has.
    """
    members = list(turns)[:_MEMBERS_MAX]
    first = {member: max(1, turns[member] - _TURNS_MAX + 1) for member in members}
    shown = [message for message in messages if _is_shown(message, first)][-_MESSAGES_MAX:]
    columns = _columns({member: range(first[member], turns[member] + 1) for member in members}, shown)
    canvas = _Canvas(members, first, columns, cut)
    parts = [canvas.member(member, turns[member]) for member in members]
    parts += [canvas.message(message) for message in shown]
    if cut is not None:
        parts.append(canvas.cut_line())
    left_out = _left_out(turns, messages, members, first, shown)
    if left_out:
        parts.append(f'<text x="8" y="{canvas.height - 8}" fill="currentColor">{escape(left_out)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {canvas.width} {canvas.height}" '
        f'width="{canvas.width}" height="{canvas.height}" font-family="sans-serif" font-size="12">'
        f"<title>{_text(title, _HOVER_MAX)}</title>{_HEAD}{''.join(parts)}</svg>"
    )


def _colour(name: str) -> str:
    """Return a colour that the style of a page around the drawing may change."""
    return f"var(--diagram-{name},{_COLOURS[name]})"


def _is_shown(message: SentMessage, first: Mapping[str, int]) -> bool:
    """Return whether both ends are in the picture. What waits has one end: the turn that sent it."""
    if message.member not in first or message.receiver not in first or message.sent_turn < first[message.member]:
        return False
    return message.taken_turn is None or message.taken_turn >= first[message.receiver]


def _left_out(
    turns: Mapping[str, int],
    messages: Sequence[SentMessage],
    members: Sequence[str],
    first: Mapping[str, int],
    shown: Sequence[SentMessage],
) -> str:
    missing = {
        "members": len(turns) - len(members),
        "earlier turns": sum(first.values()) - len(first),
        "messages": len(messages) - len(shown),
    }
    words = ", ".join(f"{count:,} {what}" for what, count in missing.items() if count)
    return f"Not shown: {words}" if words else ""


def _columns(turns: Mapping[str, range], messages: Sequence[SentMessage]) -> dict[Turn, int]:
    """Return the column of each turn: after the turn before it, and after those that sent what it took."""
    after: dict[Turn, list[Turn]] = {}
    waits: dict[Turn, int] = {(member, turn): 0 for member, numbers in turns.items() for turn in numbers}
    edges = [((member, turn - 1), (member, turn)) for member, numbers in turns.items() for turn in numbers[1:]]
    edges += [
        ((message.member, message.sent_turn), (message.receiver, message.taken_turn))
        for message in messages
        if message.taken_turn is not None
    ]
    for cause, effect in edges:
        if cause in waits and effect in waits:
            after.setdefault(cause, []).append(effect)
            waits[effect] += 1
    columns: dict[Turn, int] = {}
    ready = deque(turn for turn, count in waits.items() if count == 0)
    earliest = dict.fromkeys(waits, 0)
    while ready:
        turn = ready.popleft()
        columns[turn] = earliest[turn]
        for effect in after.get(turn, ()):
            earliest[effect] = max(earliest[effect], columns[turn] + 1)
            waits[effect] -= 1
            if waits[effect] == 0:
                ready.append(effect)
    for turn in waits:  # damaged rows may say that two turns caused each other: they stand somewhere
        columns.setdefault(turn, earliest[turn])
    return columns


class _Canvas:
    """Places of turns, and what is drawn there."""

    def __init__(
        self,
        members: Sequence[str],
        first: Mapping[str, int],
        columns: Mapping[Turn, int],
        cut: Mapping[str, int] | None,
    ) -> None:
        self._members, self._first, self._columns, self._cut = members, first, columns, cut
        self.width = _LEFT + _STEP * (max(columns.values(), default=0) + 3)
        self.height = _TOP + _LANE * len(members) + 20

    def member(self, member: str, newest: int) -> str:
        y = self._y(member)
        boxes = "".join(
            f'<rect x="{self._x(member, turn) - 4}" y="{y - 7}" width="8" height="14" rx="2" fill="{_colour("turn")}">'
            f"<title>{_text(member, _HOVER_MAX)}, turn {turn}</title></rect>"
            for turn in range(self._first[member], newest + 1)
        )
        return (
            f'<text x="8" y="{y + 4}" fill="currentColor">{_text(member, _NAME_MAX)}'
            f"<title>{_text(member, _HOVER_MAX)}</title></text>"
            f'<line x1="{_LEFT - _STEP}" y1="{y}" x2="{self.width}" y2="{y}" stroke="currentColor" opacity="0.4"/>'
            f"{boxes}"
        )

    def message(self, message: SentMessage) -> str:
        x1, y1 = self._x(message.member, message.sent_turn), self._y(message.member)
        if message.taken_turn is None:
            x2, y2 = x1 + 1.5 * _STEP, (2 * y1 + self._y(message.receiver)) / 3
        else:
            x2, y2 = self._x(message.receiver, message.taken_turn), self._y(message.receiver)
        kind = self._kind(message)
        words = {"flying": ", in flight at the cut", "orphan": ", an orphan: taken before the cut, sent after it"}
        hover = f"{_text(message.member, _HOVER_MAX)} to {_text(message.receiver, _HOVER_MAX)}{words.get(kind, '')}"
        dashes = ' stroke-dasharray="4 3"' if message.taken_turn is None else ""
        return (
            f'<line x1="{x1}" y1="{y1}" x2="{x2:g}" y2="{y2:g}" stroke="{_colour(kind)}" class="{kind}" '
            f'stroke-width="{1 if kind == "message" else 2.5}" marker-end="url(#arrow)"{dashes}>'
            f"<title>{hover}</title></line>"
        )

    def cut_line(self) -> str:
        assert self._cut is not None
        points = " ".join(
            f"{self._x(member, self._cut.get(member, 0)) + _STEP / 2:g},{self._y(member) + half:g}"
            for member in self._members
            for half in (-_LANE / 2, _LANE / 2)
        )
        return (
            f'<polyline points="{points}" fill="none" stroke="{_colour("cut")}" stroke-width="3" '
            'stroke-dasharray="8 4"><title>the cut</title></polyline>'
        )

    def _kind(self, message: SentMessage) -> str:
        if self._cut is None:
            return "message"
        is_sent = message.sent_turn <= self._cut.get(message.member, 0)
        is_taken = message.taken_turn is not None and message.taken_turn <= self._cut.get(message.receiver, 0)
        return "message" if is_sent == is_taken else "flying" if is_sent else "orphan"

    def _x(self, member: str, turn: int) -> int:
        column = self._columns.get((member, turn))
        return _LEFT - _STEP if column is None else _LEFT + _STEP * column

    def _y(self, member: str) -> int:
        return _TOP + _LANE * self._members.index(member) + _LANE // 2


def _text(name: str, most: int) -> str:
    """Return a name as text of XML, which allows no control characters."""
    clean = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return escape(clean if len(clean) <= most else clean[: most - 1] + "…")
