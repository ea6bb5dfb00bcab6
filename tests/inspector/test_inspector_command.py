"""`perdure inspect`: what it opens, and what it refuses."""

from __future__ import annotations

import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from inspector_agents import flight

import perdure
from perdure.cli import main

ROOT = Path(__file__).parents[2]


def opened(link: str) -> str:
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with opener.open(link, timeout=10) as answer:
        return str(answer.read().decode())


def test_a_bundle_and_a_backup_are_shown_and_a_bundle_is_read_only(
    store: perdure.Store, command: Callable[..., str], tmp_path: Path
) -> None:
    store.run(flight, "Rome", id="trip-rome")
    store.snapshot("s").export(tmp_path / "bundle.db")
    store.ops.backup(tmp_path / "monday.backup")
    bundle = opened(command(url=str(tmp_path / "bundle.db")))
    assert "trip-rome" in bundle
    assert "Read-only" in bundle
    assert "trip-rome" in opened(command("--read-only", url=str(tmp_path / "monday.backup")))


def test_a_store_on_postgresql_is_shown_without_its_password(command: Callable[..., str], postgres_url: str) -> None:
    with perdure.open(postgres_url) as store:
        store.run(flight, "Rome", id="trip-rome")
    page = opened(command(url=postgres_url))
    assert "trip-rome" in page
    assert "perdure answer trip-rome 1 &#39;&lt;answer&gt;&#39; --store URL" in page


def test_the_commands_that_pages_show_name_the_tenant(store: perdure.Store, command: Callable[..., str]) -> None:
    store.tenant("acme").run(flight, "Rome", id="trip-rome")
    assert "agent.db --tenant acme" in opened(command("--tenant", "acme"))


def test_without_its_cookie_the_server_says_what_to_do(store: perdure.Store, command: Callable[..., str]) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(command().partition("?")[0], timeout=10)
    assert b"Open the link" in refused.value.read()


def test_another_address_needs_the_names_that_browsers_use(
    store: perdure.Store, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", path, "--host", "0.0.0.0"]) == 2
    assert "--allow-host" in capsys.readouterr().err
    assert main(["inspect", path, "--root-path", "/a b"]) == 2
    assert main(["inspect", "nothing.db"]) == 4


def test_templates_and_static_files_are_in_the_wheel(tmp_path: Path) -> None:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    files = [path for part in ("templates", "static") for path in (source / "perdure/inspector" / part).iterdir()]
    assert files
    assert {str(path.relative_to(source)) for path in files} <= names
