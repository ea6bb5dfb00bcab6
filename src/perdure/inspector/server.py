"""Makes the application for one store, and serves it until it is interrupted."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import uvicorn
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

import perdure
from perdure.errors import NotFound, UsageError
from perdure.inspector import values
from perdure.inspector.actions import Action, Fields
from perdure.inspector.live import Live
from perdure.inspector.pages import ACTIONS, NAVIGATION, PAGES, STREAMS
from perdure.inspector.pages.memory import text_of
from perdure.inspector.security import Access, Guard, own_path, read_form
from perdure.inspector.view import Kept, Page, PageView, Settings, unquoted
from perdure.views import readable, to_json

_HERE = Path(__file__).parent
_BADGE_MAX = 99
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class _NameConvertor(Convertor[str]):
    """A name in a path, with any characters: `/runs/{id:name}`."""

    regex = r"[\s\S]+"

    def convert(self, value: str) -> str:
        return unquoted(value)

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _NameConvertor())


class Inspector:
    """The pages and actions of one store."""

    def __init__(self, store: perdure.Store, settings: Settings, access: Access, live: Live | None = None) -> None:
        self.store, self.settings, self.access = store, settings, access
        self.live, self.notices, self.kept = live or Live(store), Kept(100), Kept(16)
        self.templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.globals |= {
            "asset": lambda name: f"{settings.root_path}/static/{name}?{_static()[name][1]}",
            "settings": settings,
            "form_token": access.form_token,
            "navigation": NAVIGATION,
        }
        self.templates.filters |= {
            "ago": values.ago,
            "exact": values.exact,
            "lasted": values.lasted,
            "brief": values.brief,
            "parted": values.parted,
            "safe_text": values.safe_text,
            "tree": values.tree,
            "json": to_json,
            "size": _size,
            "namespace": text_of,
            "tag_text": lambda tag: shlex.quote("=".join(tag)),
        }

    def app(self) -> Guard:
        """Return the application, guarded."""
        routes = [Route("/static/{name}", _serve_static), Route("/events", self.live.respond)]
        for page in PAGES:
            routes += [Route(page.path, self._page(page)), Route(f"/api{page.path}", self._twin(page))]
        routes += [Route(path, self._stream(events)) for path, events in STREAMS]
        routes += [Route(f"/do/{name}", self._action(name, one), methods=["POST"]) for name, one in ACTIONS.items()]
        handlers: dict[Any, Any] = dict.fromkeys((perdure.PerdureError, HTTPException, Exception), self._failed)
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self.access)

    # --- pages

    def _page(self, page: Page) -> Callable[[Request], Any]:
        async def respond(request: Request) -> Response:
            view = self._view(request)
            return await self._render(view, page.template, await page.data(view))

        return respond

    def _twin(self, page: Page) -> Callable[[Request], Any]:
        async def respond(request: Request) -> Response:
            view = self._view(request)
            answer = _json(await page.data(view))
            if "download" in view.query:
                answer.headers["Content-Disposition"] = 'attachment; filename="perdure.json"'
            return answer

        return respond

    def _stream(self, events: Callable[[PageView], AsyncGenerator[str, None]]) -> Callable[[Request], Any]:
        async def respond(request: Request) -> Response:
            return self.live.stream(events(self._view(request)))

        return respond

    def _view(self, request: Request) -> PageView:
        path, query = request.scope["path"], dict(request.query_params)
        store, tenant = self.store, query.get("tenant")
        if tenant is not None:
            if not self.settings.all_tenants:
                raise UsageError("this inspector shows one tenant: start it with --all-tenants to see others")
            store = store.tenant(tenant)
        return PageView(store, self.settings, path, request.path_params, query, dict(request.headers), self.kept)

    async def _render(self, view: PageView, template: str, data: dict[str, Any], status: int = 200) -> HTMLResponse:
        frame: dict[str, Any] = {
            "view": view,
            "link": view.link,
            "here": view.here,
            "query": view.query,
            "theme": cookie_parser(view.headers.get("cookie", "")).get("theme"),
            "notice": self.notices.get(view.query.get("notice")),
            "waiting": None,
            "tenants": [],
        }
        with contextlib.suppress(perdure.PerdureError):  # the frame of an error page must not fail too
            waiting = len(await view.store.aquestions(limit=_BADGE_MAX + 1))
            frame["waiting"] = f"{_BADGE_MAX}+" if waiting > _BADGE_MAX else waiting
            if self.settings.all_tenants and not view.part:
                frame["tenants"] = await self.store.ops.atenants(limit=200)
        return HTMLResponse(self.templates.get_template(template).render({**frame, **data}), status)

    # --- actions

    def _action(self, name: str, action: Action) -> Callable[[Request], Any]:
        async def respond(request: Request) -> Response:
            sent = await read_form(request, self.access)
            if sent is None:
                raise HTTPException(HTTPStatus.FORBIDDEN, "This form is not of this server: reload the page.")
            [back], confirmed = sent.pop("back", ["/"])[:1], sent.pop("confirmed", None)
            view, fields = self._view(request), Fields(sent)
            if not view.who:
                text = f"The proxy did not say who you are (header {self.settings.who_header}): nothing was changed."
                raise HTTPException(HTTPStatus.FORBIDDEN, text)
            try:
                plan = await action(view, fields)
                if confirmed is None:
                    data = {"plan": plan, "fields": fields.pairs(), "back": own_path(back), "action": name}
                    return await self._render(view, "confirm.html", data)
                said = ("good", await plan.do())
            except (perdure.PerdureError, ValueError) as error:
                said = ("bad", str(error))
            self.notices.keep(notice := secrets.token_urlsafe(9), said)
            return RedirectResponse(_with_notice(own_path(back), notice), HTTPStatus.SEE_OTHER)

        return respond

    # --- errors

    async def _failed(self, request: Request, error: Exception) -> Response:
        status, text = HTTPStatus.INTERNAL_SERVER_ERROR, "The inspector failed; its terminal shows why."
        if isinstance(error, HTTPException):
            status, text = HTTPStatus(error.status_code), error.detail
            text = "There is no such page." if status == HTTPStatus.NOT_FOUND else text
        elif isinstance(error, perdure.PerdureError):
            status, text = HTTPStatus.NOT_FOUND if isinstance(error, NotFound) else HTTPStatus.BAD_REQUEST, str(error)
        if request.scope["path"].startswith("/api"):
            return _json({"error": text}, status)
        view = PageView(self.store, self.settings, request.scope["path"], {}, {}, dict(request.headers))
        return await self._render(view, "error.html", {"status": status, "text": text}, status)


def _json(data: Any, status: int = 200) -> Response:
    return Response(to_json(_encoded(data)), status, media_type="application/json")


def _encoded(data: Any) -> Any:
    """Return a page's data with times as text. Only what `PageView.value` made may be deep: it is plain already."""
    if isinstance(data, dict):
        return {name: _encoded(value) for name, value in data.items()}
    return [_encoded(value) for value in data] if isinstance(data, list | tuple) else readable(data)


def _with_notice(url: str, notice: str) -> str:
    parts = urlsplit(url)
    query = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name != "notice"]
    return parts._replace(query=urlencode([*query, ("notice", notice)])).geturl()


def _size(count: int | None) -> str:
    if count is None:
        return ""
    for limit, unit in ((10**3, "B"), (10**6, "KB"), (10**9, "MB"), (10**12, "GB")):
        if count < limit:
            amount = count / (limit / 1000)
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.3g} {unit}"
    return f"{count / 10**12:.3g} TB"


# --- static files


@cache
def _static() -> dict[str, tuple[bytes, str]]:
    """Return the static files by name, with a mark of their contents: a URL with it may be kept by browsers."""
    files = {path.name: path.read_bytes() for path in (_HERE / "static").iterdir()}
    return {name: (content, hashlib.sha256(content).hexdigest()[:8]) for name, content in files.items()}


async def _serve_static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _static():
        raise HTTPException(HTTPStatus.NOT_FOUND)
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(_static()[name][0], media_type=_TYPES[Path(name).suffix], headers=headers)


# --- the server


def serve(
    store: perdure.Store,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8765,
    allow_hosts: Sequence[str] = (),
) -> None:
    """Serve a store until Ctrl-C. Prints the link with the token. Port 0 takes a free one."""
    if host not in ("127.0.0.1", "localhost", "::1") and not allow_hosts:
        raise UsageError(f"--host {host}: also give --allow-host, the name that browsers use for this server")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: {error.strerror}; --port 0 takes a free port") from error
    with listener:
        # Connections inherit it. Without it the body of an answer waits until the browser has confirmed the headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        own = (
            () if allow_hosts and host not in ("127.0.0.1", "localhost", "::1") else ("127.0.0.1", "localhost", "[::1]")
        )
        hosts = frozenset({*(f"{name}:{port}" for name in own), *allow_hosts})
        access = Access(hosts, port, settings.read_only, settings.root_path)
        live = Live(store, lambda: server.should_exit)
        config = uvicorn.Config(
            Inspector(store, settings, access, live).app(),
            log_level="warning",
            access_log=False,  # it would have the token
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=3,
        )
        server = uvicorn.Server(config)
        shown = allow_hosts[0] if allow_hosts else f"{host if ':' not in host else f'[{host}]'}:{port}"
        print(f"http://{shown}{settings.root_path}/?token={access.token}", flush=True)
        print("Anyone with this link can read and change the store. Ctrl-C stops the inspector.", file=sys.stderr)
        # uvicorn raises the signal again when it has stopped: both end here, so that the store is closed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
