"""The commands that give history away, or prove it."""

from __future__ import annotations

import json
from pathlib import Path

from cli_runs_kit import Run, lines
from snapshot_kit import count, key_pair

import perdure


def filled() -> None:
    with perdure.open("agent.db", durability="normal") as store:
        store.thread("support-1").save({"messages": [{"role": "user", "content": "I am al@ice.org"}]})
        store.thread("other").save({})
        store.run(count, 2, id="trip")
        store.snapshot("s")


def test_bundle_and_check(run: Run, where: Path) -> None:
    filled()
    private, public = key_pair(where, "audit")
    _, other = key_pair(where, "other")
    line = ("snapshot", "export", "s", "incident.db", "--thread", "support-*", "--sign", str(private))
    assert run(*line)[0] == 0
    code, out, _ = run("snapshot", "check", "incident.db", "--key", str(public))
    assert code == 0
    assert out.startswith("unchanged: snapshot s of tenant default, signed by ")
    assert json.loads(run("snapshot", "check", "incident.db", "--json")[1])["snapshot"] == "s"
    with perdure.ops.open_bundle("incident.db") as found:
        assert [info.name for info in found.threads()] == ["support-1"]
    assert "another key signed it" in run("snapshot", "check", "incident.db", "--key", str(other))[2]
    with open("incident.db", "r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    code, _, err = run("snapshot", "check", "incident.db")
    assert (code, "a byte of it was changed" in err) == (4, True)
    assert run(*line, "--since", "s")[0] == 2, "no bundle is replaced"
    assert run("snapshot", "check", "none.db")[0] == 3


def test_audit(run: Run, where: Path) -> None:
    filled()
    private, public = key_pair(where, "audit")
    entries = lines(run("audit", "trip", "--json")[1])
    assert [entry["place"] for entry in entries] == ["arguments", "1", "2", "outcome"]
    assert run("audit", "trip")[1].splitlines()[3].split()[-3:] == [entries[2]["hash"][:16], "2", "look_up"]
    assert run("audit", "trip", "--write", "head", "--sign", str(private))[0] == 0
    assert run("audit", "trip", "--check", "head", "--key", str(public))[:2] == (
        0,
        "no history was rewritten: 4 entries\n",
    )
    assert run("audit", "trip", "--sign", str(private))[0] == 2
    with perdure.open("agent.db") as store:
        store.delete_run("trip")
        store.run(count, 2, id="trip")
    assert run("audit", "trip", "--check", "head")[0] == 1
    assert len(lines(run("audit", "support-1", "--thread", "--json")[1])) == 1
    assert run("audit", "missing")[0] == 3


def test_export_dataset(run: Run, where: Path) -> None:
    filled()
    code, out, _ = run("export-dataset", "--redact", r"[\w.]+@[\w.]+")
    found = {one["id"]: one for one in lines(out)}
    assert (code, set(found)) == (0, {"thread:support-1", "run:trip"})
    assert found["thread:support-1"]["messages"] == [{"role": "user", "content": "I am [redacted]"}]
    with perdure.open("agent.db") as store:
        store.delete_run("trip")
    for options, ids in (((), ["thread:support-1"]), (("--snapshot", "s"), ["thread:support-1", "run:trip"])):
        assert [one["id"] for one in lines(run("export-dataset", *options)[1])] == ids
    assert run("export-dataset", "--redact", "(")[0] == 2
