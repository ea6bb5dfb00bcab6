"""`perdure deploy`: the version of new runs, canaries, open runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from cli_runs_kit import APP, Run, lines

import perdure
from perdure.runs.functions import specs


def test_deploy_list_remove(run: Run, store: perdure.Store, app: ModuleType) -> None:
    assert "no deployments" in run("deployments")[2]
    code, _, err = run("deploy", "travel", "2", "--canary", "5%")
    assert code == 2
    assert "deploy the one in use first" in err
    assert run("deploy", "travel", "1")[:2] == (0, "new runs of travel get 1\n")
    said = "2.5% of new runs of travel get 2, the others 1\n"
    assert run("deploy", "travel", "2", "--canary", "2.5%")[:2] == (0, said)
    [found] = lines(run("deployments", "--json")[1])
    assert (found["canary"], found["share"], found["canary_failed"]) == ("2", 0.025, 0)
    head, row = run("deployments")[1].splitlines()
    assert head.split() == ["function", "version", "canary", "since", "failed"]
    assert " ".join(row.split()) == "travel 1 2, 2.5% just now 0 of 2, 0 of 1"
    made = json.loads(run("deploy", "travel", "1", "--json")[1])
    assert (made["version"], made["canary"], made["moved"]) == ("1", None, [])
    said = "new runs of travel get the version of the code that starts them\n"
    assert run("deploy", "travel", "--remove")[:2] == (0, said)
    assert store.ops.deployments() == []


def test_move_names_what_stays(
    run: Run, store: perdure.Store, app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.run(app.travel, "NYC", id="fits")
    store.run(app.travel, "SFO", id="differs")
    (tmp_path / "app2.py").write_text(
        APP.replace('version="1"', 'version="2"').replace("search(dest)", "search(dest.replace('SFO', 'LAX'))")
    )
    for known in ("_durables", "_steps"):  # another process
        monkeypatch.setattr(specs, known, {})
    code, out, err = run("deploy", "app2.py:travel", "2", "--move")
    assert (code, "2 open runs of other versions: 1 moved" in err) == (1, True)
    text, *rest = out.splitlines()
    assert text == "new runs of travel get 2"
    assert [line.split()[:2] for line in rest] == [["moved", "fits"], ["stays", "differs"]]
    assert "at step 1" in rest[1]
    assert [store.get_run(name).refresh().version for name in ("fits", "differs")] == ["2", "1"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["travel"], "give VERSION"),
        (["travel", "2", "--remove"], "give VERSION"),
        (["travel", "2", "--canary", "5%", "--move"], "--canary or --move"),
        (["travel", "2", "--canary", "500%"], "is not a share"),
        (["travel", "2", "--move"], "--move needs the code of '2'"),
        (["cli_runs_app.py:travel", "2", "--move"], "--move needs the code of '2'"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Run, store: perdure.Store, app: ModuleType, line: list[str], said: str
) -> None:
    code, out, err = run("deploy", *line)
    assert (code, out) == (2, "")
    assert said in err
    assert store.ops.deployments() == []


def test_nothing_to_remove(run: Run, store: perdure.Store) -> None:
    code, _, err = run("deploy", "travel", "--remove")
    assert code == 3
    assert "there is no deployment of 'travel'" in err
