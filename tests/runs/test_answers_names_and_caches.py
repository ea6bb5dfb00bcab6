"""What an attacker found in answers, caches, open effects, names: each test is the smallest case of a finding."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attack_kit import asks_once
from lab import Lab, hooked

import perdure
from perdure import outcome
from perdure.runs.execution.hooks import Point


@pytest.fixture
def local(tmp_path: Path) -> Iterator[perdure.Store]:
    with perdure.open(str(tmp_path / "runs.db")) as store:
        yield store


# --- an answer that counts is never lost


@pytest.mark.parametrize("gives_up", ["perdure.timeout", "timeout_s"])
def test_an_answer_that_was_accepted_in_the_last_moment_counts(lab: Lab, gives_up: str) -> None:
    given: list[perdure.Store | object] = []

    @lab.durable
    async def agent() -> Any:
        if gives_up == "timeout_s":
            return await lab(perdure.ask("ok?", timeout_s=0.2, on_timeout="late"))
        try:
            with perdure.timeout(0.2):
                return await lab(perdure.ask("ok?"))
        except TimeoutError:
            return "late"

    def answer() -> None:
        try:
            given.append(lab.store.answer("r", "yes").settled)
        except perdure.errors.AnswerRefused as error:
            given.append(error)

    def hook(point: Point) -> None:
        if (point.kind, point.name, point.when) == ("done", "perdure.ask", "before") and not given:
            thread = threading.Thread(target=answer)
            thread.start()
            thread.join(20)

    with hooked(hook):
        result = lab.run(agent, id="r").result(timeout_s=20)
    # On SQLite, and for a question with a time of its own, the answer is refused because that time is over.
    assert result == ("yes" if given == [True] else "late")
    if gives_up == "perdure.timeout":
        assert given == [True]


def test_an_answer_between_the_look_and_the_giving_up_counts(sync_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from perdure.runs.calls import asks

    looked: list[int] = []
    look = asks.look

    def late_look(session: Any, path: str) -> Any:
        state = yield from look(session, path)
        if not looked:  # the question is open, and by this clock its time is over
            looked.append(1)
            assert sync_lab.store.answer("r", "yes").settled
            assert state is not None
            assert state.deadline is not None
            return asks.AskState("open", None, state.deadline, state.deadline, state.terms)
        return state

    @perdure.durable
    def agent() -> Any:
        return perdure.ask("ok?", timeout_s=600, on_timeout="late")

    monkeypatch.setattr(asks, "look", late_look)
    assert sync_lab.run(agent, id="r").result(timeout_s=60) == "yes"


def test_an_approval_is_given_by_true_and_not_by_a_number(lab: Lab) -> None:
    @lab.effect(approve=True)
    def pays() -> str:
        return "paid"

    @lab.durable
    async def agent() -> Any:
        return await lab(pays())

    lab.run(agent, id="r")
    for wrong in (1, 0, 1.0, "true"):
        with pytest.raises(perdure.errors.AnswerRefused, match="one of"):
            lab.store.answer("r", wrong)
    assert lab.store.answer("r", True).settled
    assert lab.run(agent, id="r").result() == "paid"


def test_a_number_is_chosen_however_json_writes_it(sync_lab: Lab) -> None:
    @perdure.durable
    def agent() -> Any:
        return perdure.ask("how many?", options=[1, 2.0, [True]])

    sync_lab.run(agent, id="r")
    for wrong in (True, [1], "1"):
        with pytest.raises(perdure.errors.AnswerRefused):
            sync_lab.store.answer("r", wrong)
    sync_lab.store.answer("r", 2)
    result = sync_lab.run(agent, id="r").result()
    assert (result, type(result)) == (2.0, float)


# --- what cannot be meant is refused


NAN, INF, HUGE = math.nan, math.inf, 1e15
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "sleep inf": (lambda: perdure.sleep(INF), "hundred years"),
    "sleep nan": (lambda: perdure.sleep(NAN), "seconds"),
    "sleep huge": (lambda: perdure.sleep(HUGE), "hundred years"),
    "ask inf": (lambda: perdure.ask("q", timeout_s=INF), "hundred years"),
    "ask nan": (lambda: perdure.ask("q", timeout_s=NAN), "hundred years"),
    "ask huge": (lambda: perdure.ask("q", timeout_s=HUGE), "hundred years"),
    "receive text": (lambda: perdure.receive(timeout_s="5"), "hundred years"),  # type: ignore[arg-type]
    "receive huge": (lambda: perdure.receive(timeout_s=HUGE), "hundred years"),
    "timeout inf": (lambda: perdure.timeout(INF), "hundred years"),
    "step inf": (lambda: perdure.step(timeout_s=INF), "hundred years"),
    "approvers text": (lambda: perdure.ask("q", approvers="ann"), "approvers=\\['ann'\\]"),  # type: ignore[arg-type]
    "quorum true": (lambda: perdure.ask("q", quorum=True), "1 or more"),
    "options": (lambda: perdure.ask("q", options=[object()]), "JSON"),
    "topic": (lambda: perdure.receive(5, timeout_s=0), "topic"),  # type: ignore[arg-type]
    "no run": (lambda: perdure.send(None, 1), "run"),  # type: ignore[arg-type]
    "patch": (lambda: perdure.patched(5), "patch"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_meant_is_refused(local: perdure.Store, case: str) -> None:
    call, match = WRONG[case]

    @perdure.durable
    def agent() -> Any:
        made = call()
        return made(lambda: None)() if case == "step inf" else made

    with pytest.raises(perdure.RunStuck, match=f"UsageError: .*{match}"):
        local.run(agent, id="r").result(timeout_s=60)


BAD = {"nul": "a\0b", "surrogate": "a\ud800b"}
PLACES_OF_TEXT: dict[str, tuple[Callable[[str], Any], str]] = {
    "question": (lambda text: perdure.ask(text), "question"),
    "option": (lambda text: perdure.ask("?", options=[text, "b"]), "option"),
    "approver": (lambda text: perdure.ask("?", approvers=[text]), "approver"),
    "topic received": (lambda text: perdure.receive(text, timeout_s=0), "topic"),
    "topic sent": (lambda text: perdure.send("r", 1, topic=text), "topic"),
    "run sent to": (lambda text: perdure.send(text, 1), "run"),
    "id of a child": (lambda text: perdure.spawn(asks_once, id=text), "run"),
    "queue of a child": (lambda text: perdure.spawn(asks_once, queue=text), "queue"),
    "patch": (lambda text: perdure.patched(text), "patch"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", PLACES_OF_TEXT)
def test_text_that_a_database_cannot_store_is_refused_in_a_run(sync_lab: Lab, place: str, bad: str) -> None:
    call, named = PLACES_OF_TEXT[place]

    @perdure.durable
    def agent() -> Any:
        return call(BAD[bad])

    with pytest.raises(perdure.RunStuck, match=f"UsageError: .*{named}.*(NUL|Unicode)"):
        sync_lab.run(agent, id="r").result(timeout_s=60)


@pytest.mark.parametrize("bad", [*BAD.values(), "x" * 70_000])
def test_text_that_a_database_cannot_store_is_refused_from_outside(sync_lab: Lab, bad: str) -> None:
    store = sync_lab.store
    store.run(asks_once, id="r")
    calls: list[Callable[[], object]] = [
        lambda: store.send("r", 1, topic=bad),
        lambda: store.send("r", 1, key=bad),
        lambda: store.answer("r", 1, who=bad),
        lambda: store.get_run(bad),
        lambda: store.runs(function=bad),
        lambda: store.runs(queue=bad),
    ]
    if len(bad) < 10:
        calls.append(lambda: store.answer("r", 1, step=bad))
    for call in calls:
        with pytest.raises(perdure.UsageError):
            call()


def test_children_of_a_run_with_a_long_id_have_ids_that_can_be_used(sync_lab: Lab) -> None:
    @perdure.durable
    def parent() -> Any:
        first, second = perdure.spawn(asks_once), perdure.spawn(asks_once)
        return [first.result(), second.result()]

    run = sync_lab.run(parent, id="p" * 512)
    asks = sync_lab.store.questions()
    assert len({ask.run for ask in asks}) == 2
    for ask in asks:
        assert len(ask.run) <= 512
        sync_lab.store.answer(ask.run, ask.run)
    assert len(run.result(timeout_s=20)) == 2


# --- effects whose outcome stays open


def test_reconcile_gets_the_arguments_as_they_were(lab: Lab) -> None:
    asked: list[Any] = []

    def reconcile(
        key: str, client: object, texts: list[str], more: list[list[str]], **named: list[str]
    ) -> outcome.NotDone:
        asked.append(
            (client, list(texts), [list(one) for one in more], {name: list(one) for name, one in named.items()})
        )
        return outcome.NotDone()

    client = object()

    @lab.effect(reconcile=reconcile, timeout_s=0.05, ignore=("client",))
    def sends_all(client: object, texts: list[str], *more: list[str], **named: list[str]) -> int:
        lab.ran.append((list(texts), [list(one) for one in more], {name: list(one) for name, one in named.items()}))
        for one in (texts, *more, *named.values()):
            one.append("junk")
        if len(lab.ran) == 1:
            raise TimeoutError
        return len(texts)

    @lab.durable
    async def agent() -> Any:
        return await lab(sends_all(client, ["a"], ["b"], extra=["c"]))

    assert lab.run(agent, id="r").result(timeout_s=20) == 3
    as_called = (["a"], [["b"]], {"extra": ["c"]})
    assert lab.ran[0] == as_called
    assert asked
    assert all(call == (client, *as_called) for call in asked)


@pytest.mark.parametrize("rule", ["retry", "reconcile"])
def test_an_effect_that_stays_in_doubt_is_not_tried_for_ever(lab: Lab, rule: str) -> None:
    options: dict[str, Any] = {"on_doubt": "retry"} if rule == "retry" else {"reconcile": lambda key: outcome.NotDone()}

    @lab.effect(timeout_s=0.01, retries=1, **options)
    def pays() -> str:
        lab.ran.append("pays")
        if len(lab.ran) <= 12:
            raise TimeoutError
        return "paid"

    @lab.durable
    async def agent() -> Any:
        return await lab(pays())

    run = lab.run(agent, id="r")
    assert getattr(run.refresh().waiting_for, "kind", None) == "doubt"
    assert len(lab.ran) == 11
    assert lab.run(agent, id="r").status == "waiting"
    run.resolve("1", not_done=True)
    assert lab.run(agent, id="r").status == "waiting"  # one more attempt, in doubt again
    assert len(lab.ran) == 12
    run.resolve("1", done="seen at the bank")
    assert lab.run(agent, id="r").result() == "seen at the bank"
    assert len(lab.ran) == 12


# --- names, tools, exports


@pytest.mark.parametrize("name", ["perdure.timeout", "perdure.ask", "task:x", "x\0", "x\ud800", "", "x" * 600])
@pytest.mark.parametrize("decorator", [perdure.step, perdure.effect, perdure.durable])
def test_a_name_that_is_perdures_own_is_refused(decorator: Any, name: str) -> None:
    with pytest.raises(perdure.UsageError, match="name"):
        decorator(name=name)(lambda: None)


def test_an_exported_run_is_not_forked_where_it_was(sync_lab: Lab, tmp_path: Path) -> None:
    sync_lab.run(asks_once, id="r")
    sync_lab.store.ops.transfer(tmp_path / "r.db", runs=["r"], move=True)
    with pytest.raises(perdure.UsageError, match="exported"):
        sync_lab.store.fork("r", id="f", keys="new")
