"""Cuts over several stores, simulated: joins, leaves, crashes, partitions, losses, duplicates, reordering, restores."""

from __future__ import annotations

from typing import Any

import pytest
from soak import SOAK
from team_faults import AcknowledgesFirst, CutsAfter, JoinsBlindly, NoCutOnSight, NoEras, TakesTwice
from team_sim import NoChain, violations

from perdure.errors import Undecodable, UsageError
from perdure.teams.protocol import Accept, Member, Parted
from perdure.teams.views import Started, TeamView

EPOCH_SEEDS, INDUCED_SEEDS, CONTROL_SEEDS = (10_000, 5_000, 400) if SOAK else (1_000, 500, 40)
CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "ignores the cut of a batch": ("snapshots", {"member": NoCutOnSight}),
    "delivers before it cuts": ("snapshots", {"member": CutsAfter}),
    "empties its outbox before it cuts": ("snapshots", {"member": AcknowledgesFirst, "steps": 4000}),
    "takes frames twice": ("quiet", {"member": TakesTwice}),
    "takes batches of older eras": ("restore", {"member": NoEras}),
    "has its marks outside of the cut": ("restore", {"member": NoChain, "marks_outside": True}),
    "believes the register before it cuts": ("join", {"member": JoinsBlindly}),
    "leaves as soon as it is empty": ("churn", {"leave_early": True}),
    "trusts numbers without hashes": ("backup", {"member": NoChain}),
}


def test_cuts_are_consistent_complete_and_lose_nothing() -> None:
    wrong, counts = violations(range(EPOCH_SEEDS))
    assert wrong == []
    assert counts["parted"] == 0, "no store was put back to a backup"
    assert min(counts[what] for what in ("cuts", "in flight", "joins", "leaves", "restores")) > 0


def test_any_store_may_begin_a_cut_when_messages_carry_its_number() -> None:
    wrong, counts = violations(range(INDUCED_SEEDS), induced=True)
    assert wrong == []
    assert counts["cuts"] > INDUCED_SEEDS


@pytest.mark.parametrize("control", CONTROLS)
def test_without_one_of_its_rules_the_protocol_fails(control: str) -> None:
    scenario, options = CONTROLS[control]
    wrong, _ = violations(range(CONTROL_SEEDS), scenario, **({"steps": 1000} | options))
    assert len(wrong) > 0.9 * CONTROL_SEEDS


@pytest.mark.parametrize("scenario", sorted({scenario for scenario, _ in CONTROLS.values()}))
def test_in_the_scenarios_of_the_controls_the_protocol_does_not_fail(scenario: str) -> None:
    seeds = CONTROL_SEEDS if SOAK else 12
    wrong, counts = violations(range(seeds), scenario, steps=1000)
    assert wrong == []
    if scenario == "backup":
        assert counts["parted"] == counts["backups"] == seeds


def exchange(*, sent: int, taken: int) -> tuple[Member, Member]:
    """Two stores: the first has sent so many messages, the second has taken so many of them."""
    first, second = Member("t", "a"), Member("t", "b")
    frames = [first.send("b", b"m%d" % number) for number in range(sent)]
    second.receive(first.batch("b", frames[:taken]))
    first.receive(second.batch("a"), frames[taken - 1].link if taken else None)
    return first, second


def test_a_sender_from_an_old_backup_is_noticed_however_much_it_has_sent_since() -> None:
    for since in range(1, 8):
        _, receiver = exchange(sent=5, taken=5)
        backup, _ = exchange(sent=2, taken=2)
        frames = [backup.send("b", b"other %d" % number) for number in range(since)]
        commands = receiver.receive(backup.batch("b", frames))
        if not any(isinstance(command, Parted) for command in commands):
            assert commands == [], "nothing of it was taken"
            acked = next((frame.link for frame in frames if frame.seq == 5), None)
            [parted] = backup.receive(receiver.batch("a"), acked)
            assert isinstance(parted, Parted)
            assert "old backup" in parted.why


def test_a_receiver_from_an_old_backup_is_noticed() -> None:
    sender, _ = exchange(sent=5, taken=5)
    _, backup = exchange(sent=5, taken=2)
    [parted] = backup.receive(sender.batch("b"))
    assert isinstance(parted, Parted)
    assert "acknowledged 5 messages of store a and has 2" in parted.why


def test_a_changed_body_is_refused_and_the_next_honest_batch_is_taken() -> None:
    first, second = Member("t", "a"), Member("t", "b")
    frame = first.send("b", b"pay 1")
    forged = first.batch("b", [frame._replace(body=b"pay 1000")])
    assert isinstance(second.receive(forged)[0], Parted)
    assert second.receive(first.batch("b", [frame])) == [Accept("a", frame)]


def test_a_view_is_read_back_and_damaged_text_is_refused() -> None:
    view = TeamView(members=("a", "b")).start().restore(1, 4)
    assert TeamView.decode(view.encode()) == view
    with pytest.raises(Undecodable, match="agreed on"):
        TeamView.decode(b"{")
    with pytest.raises(UsageError, match="has no cut 7; it has 1"):
        view.restore(7, 7)


def test_a_cut_of_long_ago_is_gone_back_to_by_its_own_manifest() -> None:
    view = TeamView(members=("a", "b", "c"))
    for _ in range(40):
        view = view.start()
    with pytest.raises(UsageError, match="has no cut 1"):
        view.restore(1, 40)
    back = view.restore(1, 41, Started(0, ("a", "b")))
    assert (back.era, back.cut, back.members) == (1, 41, ("a", "b"))
