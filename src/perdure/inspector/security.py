"""Who may ask for a page, and what a page may do: the one place that every request and every answer passes.

Listening on this machine alone is not enough. Any web page that a person visits can send requests here, and with DNS
rebinding it can read the answers. So a request needs a Host of ours and the cookie that the link with the token sets;
an action also needs an Origin of ours and the token of our forms.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_MAX_BYTES = 1_000_000
_FIELDS_MAX = 10_000
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers send `Origin: null` with forms
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_OWN_PATH = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*")


@dataclass(frozen=True)
class Access:
    """Who may use this server. `hosts` are the values of the Host header that it answers to, ports included."""

    hosts: Collection[str]
    port: int
    read_only: bool = False
    root_path: str = ""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def cookie(self) -> str:
        """The name of the cookie. All ports of a host share their cookies, so the port is in it."""
        return f"perdure-{self.port}"

    @property
    def session(self) -> str:
        """The value of the cookie. The token itself stays in the link."""
        return self._derived("session")

    @property
    def form_token(self) -> str:
        """The token of forms, which no other site can read."""
        return self._derived("form")

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.token.encode(), purpose.encode(), hashlib.sha256).hexdigest()


class Guard:
    """Wraps the application: refuses foreign requests, and adds the policy to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        root = self.access.root_path
        if root and scope["path"].startswith(f"{root}/"):  # a proxy may leave the prefix in place
            scope = {**scope, "path": scope["path"].removeprefix(root)}

        async def hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if "Cache-Control" not in headers:
                    headers["Cache-Control"] = "no-store"
            await send(message)

        request = Request(scope)
        await (self._refusal(request) or self.app)(scope, receive, hardened)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that may not pass; None if it may."""
        if request.headers.get("host", "") not in self.access.hosts:
            return _refused(HTTPStatus.MISDIRECTED_REQUEST, "This Host is not served here; see --allow-host.")
        path = request.scope["path"]
        if path.startswith("/static/") and request.method in ("GET", "HEAD"):
            return None
        token = request.query_params.get("token")
        if token is not None and request.method == "GET":
            return self._login(request, path, token)
        if not _same(request.cookies.get(self.access.cookie, ""), self.access.session):
            text = "Open the link that `perdure inspect` printed: it has a token. If you just did, reload this page."
            return _refused(HTTPStatus.UNAUTHORIZED, text)
        return None if request.method in ("GET", "HEAD") else self._refused_action(request)

    def _login(self, request: Request, path: str, token: str) -> Response:
        if not _same(token, self.access.token):
            text = "This token is of another server: open the link that `perdure inspect` printed last."
            return _refused(HTTPStatus.UNAUTHORIZED, text)
        query = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        target = own_path(path) + (f"?{urlencode(query)}" if query else "")
        answer = RedirectResponse(self.access.root_path + target, HTTPStatus.SEE_OTHER)
        where = self.access.root_path or "/"
        answer.set_cookie(self.access.cookie, self.access.session, httponly=True, samesite="strict", path=where)
        return answer

    def _refused_action(self, request: Request) -> Response | None:
        if self.access.read_only:
            return _refused(HTTPStatus.FORBIDDEN, "This inspector is read-only.")
        scheme, _, origin = request.headers.get("origin", "").partition("://")
        ours = scheme in ("http", "https") and origin in self.access.hosts
        if not ours or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return _refused(HTTPStatus.FORBIDDEN, "This action did not come from a page of the inspector.")
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > BODY_MAX_BYTES:
            return _refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "A form may have 1 MB.")
        return None


def own_path(text: str) -> str:
    """Return a path of this server to redirect to; "/" for everything else, such as `//elsewhere`."""
    return text if _OWN_PATH.fullmatch(text) else "/"


async def read_form(request: Request, access: Access) -> dict[str, list[str]] | None:
    """Return the fields of a form; None if it is not one of ours."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MAX_BYTES:
            return None
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="strict")
    except ValueError:
        return None
    form: dict[str, list[str]] = {}
    for name, value in pairs:
        form.setdefault(name, []).append(value)
    [token] = form.pop("form_token", [""])[:1]
    return form if _same(token, access.form_token) else None


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode("utf-8", "surrogateescape"), b.encode())


def _refused(status: HTTPStatus, text: str) -> Response:
    return PlainTextResponse(text + "\n", status)
