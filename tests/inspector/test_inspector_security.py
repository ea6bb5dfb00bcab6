"""Who may ask, and what a page may do: each attack is refused, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from inspector_agents import fill, flight
from inspector_fixtures import HOST, OURS, Client

import perdure

ANSWER: dict[str, Any] = {"run": "trip", "path": "1", "option": "0", "back": "/"}


@pytest.mark.parametrize("host", ["evil.example:8765", "127.0.0.1", "127.0.0.1:80", "127.0.0.1:8765.evil.example", ""])
def test_a_foreign_host_is_refused(client: Callable[..., Client], host: str) -> None:
    for path in ("/", "/api/", "/static/style.css", "/events"):
        assert client().get(path, headers={"host": host}).status_code == 421


def test_the_link_sets_a_cookie_of_this_port_and_the_token_leaves_the_url(client: Callable[..., Client]) -> None:
    visitor = client(logged_in=False)
    assert visitor.get("/").status_code == 401
    assert visitor.get("/?token=wrong").status_code == 401
    assert visitor.get("/?token=%F0%9F%98%80").status_code == 401
    answer = visitor.get(f"/runs?status=failed&token={visitor.access.token}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?status=failed")
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith(f"perdure-8765={visitor.access.session}")
    assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/"))
    assert visitor.access.token not in cookie
    assert visitor.get("/").status_code == 200


def test_a_wrong_cookie_is_refused_everywhere(client: Callable[..., Client]) -> None:
    visitor = client(logged_in=False)
    visitor.cookies.set(visitor.access.cookie, visitor.access.form_token)
    for path in ("/", "/api/", "/events", "/nowhere"):
        assert visitor.get(path).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": f"ftp://{HOST}"},
        {},
        {**OURS, "sec-fetch-site": "cross-site"},
        {**OURS, "sec-fetch-site": "same-site"},
    ],
)
def test_a_form_of_another_site_is_refused(
    store: perdure.Store, client: Callable[..., Client], headers: dict[str, str]
) -> None:
    store.run(flight, "Rome", id="trip")
    visitor = client()
    data = {**ANSWER, "form_token": visitor.access.form_token, "confirmed": "yes"}
    assert visitor.post("/do/answer", data=data, headers=headers).status_code == 403
    assert len(store.questions()) == 1


def test_a_form_without_its_token_is_refused(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(flight, "Rome", id="trip")
    visitor = client()
    for token in ({}, {"form_token": "x"}, {"form_token": visitor.access.session}):
        answer = visitor.post("/do/answer", data={**ANSWER, **token, "confirmed": "yes"}, headers=OURS)
        assert answer.status_code == 403
    assert visitor.post("/do/answer", content=b"\xff\xfe", headers=OURS).status_code == 403
    assert visitor.get("/do/answer").status_code == 405
    assert len(store.questions()) == 1


def test_an_action_asks_first(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(flight, "Rome", id="trip")
    answer = client().post_form("answer", confirmed=False, **ANSWER)
    assert answer.status_code == 200
    assert "perdure answer trip 1 Rome-1 --who" in answer.text
    assert len(store.questions()) == 1


def test_a_form_over_one_megabyte_is_refused(client: Callable[..., Client]) -> None:
    visitor = client()
    assert visitor.post("/do/answer", content=b"x" * 1_000_001, headers=OURS).status_code == 413
    chunks = (b"x" * 1000 for _ in range(1001))  # says no length
    assert visitor.post("/do/answer", content=chunks, headers=OURS).status_code == 413


@pytest.mark.parametrize(
    "back",
    ["//evil.example", "https://evil.example", "/\\evil.example", "\\\\evil", "javascript:alert(1)", "/\t/evil", ""],
)
def test_an_action_returns_to_this_server_alone(store: perdure.Store, client: Callable[..., Client], back: str) -> None:
    store.run(flight, "Rome", id="trip")
    answer = client().post_form("answer", **{**ANSWER, "back": back})
    assert re.fullmatch(r"/\?notice=[\w-]+", answer.headers["location"])
    login = client(logged_in=False)
    assert login.get(f"http://{HOST}//evil.example/?token={login.access.token}").headers["location"] == "/"


@pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "%2e%2e/security.py", "/etc/passwd", "nothing.css"])
def test_static_files_are_those_of_the_folder(client: Callable[..., Client], name: str) -> None:
    assert client().get(f"/static/{name}").status_code == 404


def test_every_answer_has_the_policy(client: Callable[..., Client]) -> None:
    visitor = client()
    for path in ("/", "/api/", "/nowhere", "/api/nowhere", "/?tenant=x", "/static/style.css"):
        headers = visitor.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == ("no-store" if "static" not in path else headers["cache-control"])


def test_read_only_refuses_every_action(store: perdure.Store, path: str, client: Callable[..., Client]) -> None:
    store.run(flight, "Rome", id="trip")
    with perdure.open(path, read_only=True) as shown:
        visitor = client(shown, read_only=True)
        assert visitor.post_form("answer", **ANSWER).status_code == 403
        assert "disabled" in visitor.get("/").text
    assert len(store.questions()) == 1


def test_other_tenants_are_shown_only_if_asked_for(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.tenant("acme").run(flight, "Rome", id="secret-trip")
    assert client().get("/?tenant=acme").status_code == 400
    assert "secret-trip" not in client().get("/").text
    every = client(all_tenants=True)
    assert "secret-trip" in every.get("/?tenant=acme").text
    assert "/runs/secret-trip?tenant=acme" in every.get("/?tenant=acme").text
    assert "secret-trip" not in every.get("/").text


def test_who_acts_is_what_the_proxy_says(store: perdure.Store, client: Callable[..., Client]) -> None:
    store.run(flight, "Rome", id="trip")
    visitor = client(who_header="X-User")
    assert visitor.post_form("answer", **ANSWER).status_code == 403
    visitor.headers["x-user"] = "maria"
    visitor.notice("answer", **ANSWER)
    [question] = store.questions(all=True)
    assert [who for who, _, _ in question.answers] == ["maria"]


def test_behind_a_prefix_links_cookies_and_forms_have_it(store: perdure.Store, client: Callable[..., Client]) -> None:
    fill(store)
    visitor = client(root_path="/agents")
    for path in ("/", "/agents/"):  # a proxy may strip the prefix, or not
        text = visitor.get(path).text
        urls = re.findall(r'(?:href|src|action)="(/[^"]*)"', text)
        assert urls
        assert [url for url in urls if not url.startswith("/agents/")] == []
    answer = visitor.get(f"/?token={visitor.access.token}")
    assert answer.headers["location"] == "/agents/"
    assert "path=/agents" in answer.headers["set-cookie"].lower()
