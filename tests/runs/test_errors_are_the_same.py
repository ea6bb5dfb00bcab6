"""A recorded error is the same when it is raised again: what code reads from it reads the same, or the run is stuck."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.error
from collections.abc import Callable, Iterator
from enum import Enum
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import aiohttp
import anthropic
import botocore.exceptions
import botocore.session
import httpx
import httpx2
import openai
import pydantic
import pytest
import requests
from lab import Interrupt, Once

import perdure

Reads = dict[str, Callable[[Any], Any]]
SECRET = "sk-very-secret-1234"
HEADERS = {"retry-after": "7", "x-request-id": "req_1", "set-cookie": "session=secret"}
CLIENT, CLIENT2 = httpx.Client(verify=False), httpx2.Client(verify=False)  # to read certificates takes half a second
BODY = {"error": {"message": "slow down", "code": "rate_limit", "type": "requests"}}


class Refusing(BaseHTTPRequestHandler):
    """Refuses everything, with a body and headers; below /large with a body that is not recorded."""

    def do_GET(self) -> None:
        body = b"x" * 70_000 if self.path == "/large" else json.dumps(BODY).encode()
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "/orders")
        else:
            self.send_response(429, "Slow Down")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("errors") / "errors.db"


@pytest.fixture(scope="module")
def store(file: Path) -> Iterator[perdure.Store]:
    """An error is the same data on both databases: one is enough."""
    with perdure.open(str(file), durability="normal") as opened:
        yield opened


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# --- where errors come from: real clients, and a real server that refuses


def by_httpx(url: str) -> None:
    CLIENT.get(f"{url}/orders?id=7", headers={"authorization": SECRET, "x-tries": "2"}).raise_for_status()


def by_requests(url: str) -> None:
    requests.get(f"{url}/orders?id=7", headers={"authorization": SECRET}).raise_for_status()


def by_httpx_after_a_redirect(url: str) -> None:
    CLIENT.get(f"{url}/moved", follow_redirects=True).raise_for_status()


def by_requests_after_a_redirect(url: str) -> None:
    requests.get(f"{url}/moved").raise_for_status()


def by_requests_unreachable(url: str) -> None:
    requests.get("http://127.0.0.1:1/")


def by_openai(url: str) -> None:
    client = openai.OpenAI(api_key=SECRET, base_url=url, max_retries=0, http_client=CLIENT2)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def by_openai_unreachable(url: str) -> None:
    client = openai.OpenAI(api_key=SECRET, base_url="http://127.0.0.1:1", max_retries=0, http_client=CLIENT2)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def by_anthropic(url: str) -> None:
    client = anthropic.Anthropic(api_key=SECRET, base_url=url, max_retries=0, http_client=CLIENT2)
    client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}])


_session = botocore.session.Session()
_s3 = _session.create_client("s3", region_name="eu-west-1", aws_access_key_id="a", aws_secret_access_key="b")
S3_ANSWER = {"Error": {"Code": "NoSuchKey", "Message": "gone"}, "ResponseMetadata": {"HTTPStatusCode": 404}}


def by_botocore(url: str) -> None:
    raise botocore.exceptions.ClientError(S3_ANSWER, "GetObject")


def by_botocore_client(url: str) -> None:
    raise _s3.exceptions.NoSuchKey(S3_ANSWER, "GetObject")


def by_botocore_unreachable(url: str) -> None:
    cause = ConnectionRefusedError(111, "refused")
    raise botocore.exceptions.EndpointConnectionError(endpoint_url="http://aws", error=cause)


class Stay(pydantic.BaseModel):
    city: str
    nights: int = pydantic.Field(gt=0)

    @pydantic.field_validator("city")
    @classmethod
    def known(cls, city: str) -> str:
        if city == "Atlantis":
            raise ValueError("it sank")
        return city


def by_pydantic(url: str) -> None:
    Stay.model_validate({"city": "Atlantis", "nights": 0})


def by_json(url: str) -> None:
    json.loads('{"city": }')


def by_urllib(url: str) -> None:
    urlopen(url)


def by_subprocess(url: str) -> None:
    subprocess.run(["sh", "-c", "echo out; echo err >&2; exit 3"], check=True, capture_output=True)


def by_file(url: str) -> None:
    Path("/nowhere/at/all").read_text()


def by_import(url: str) -> None:
    import there_is_no_such_module  # type: ignore[import-not-found]  # noqa: F401


def by_bytes(url: str) -> None:
    b"ab\xff".decode()


def by_aiohttp(url: str) -> None:
    async def get() -> None:
        async with aiohttp.ClientSession(headers={"authorization": SECRET}) as session, session.get(url) as response:
            response.raise_for_status()

    asyncio.run(get())


def by_aiohttp_unreachable(url: str) -> None:
    async def get() -> None:
        async with aiohttp.ClientSession() as session:
            await session.get("http://127.0.0.1:1/")

    asyncio.run(get())


class Reason(Enum):
    DECLINED = "card_declined"
    EXPIRED = "card_expired"


class PaymentFailed(Exception):
    def __init__(self, reason: Reason, tried: list[Reason]) -> None:
        super().__init__(reason, tried)
        self.reason = reason


def with_members_of_an_enum(url: str) -> None:
    raise PaymentFailed(Reason.DECLINED, [Reason.EXPIRED])


def history_of(error: Any) -> list[Any]:
    return [(each.status_code, each.headers["location"], str(each.url)) for each in error.response.history]


HTTPX: Reads = {
    "status": lambda e: e.response.status_code,
    "header": lambda e: e.response.headers["Retry-After"],
    "no header": lambda e: e.response.headers.get("x-none"),
    "is there": lambda e: "x-request-id" in e.response.headers,
    "json": lambda e: e.response.json(),
    "text": lambda e: e.response.text,
    "is_client_error": lambda e: e.response.is_client_error,
    "reason": lambda e: e.response.reason_phrase,
    "url": lambda e: str(e.request.url),
    "query": lambda e: dict(e.request.url.params),
    "method": lambda e: e.request.method,
    "request header": lambda e: e.request.headers.get("x-tries"),
    "of the response": lambda e: e.response.request.method,
    "elapsed": lambda e: e.response.elapsed.total_seconds(),
    "bytes": lambda e: e.response.num_bytes_downloaded,
    "version": lambda e: e.response.http_version,
    "history": history_of,
}
SDK: Reads = {
    "status_code": lambda e: e.status_code,
    "body": lambda e: e.body,
    "message": lambda e: e.message,
    "request_id": lambda e: e.request_id,
    "header": lambda e: e.response.headers["retry-after"],
    "json": lambda e: e.response.json(),
    "elapsed": lambda e: e.response.elapsed.total_seconds(),
    "method": lambda e: e.request.method,
}
UNREACHABLE: Reads = {"host": lambda e: e.host, "port": lambda e: e.port, "os": lambda e: (e.errno, e.os_error.errno)}
ERRORS: dict[Callable[[str], None], tuple[type[Exception], Reads]] = {
    by_httpx: (httpx.HTTPStatusError, HTTPX),
    by_requests: (
        requests.HTTPError,
        {
            "status": lambda e: e.response.status_code,
            "header": lambda e: e.response.headers["RETRY-AFTER"],
            "json": lambda e: e.response.json(),
            "text": lambda e: e.response.text,
            "ok": lambda e: e.response.ok,
            "reason": lambda e: e.response.reason,
            "url": lambda e: e.response.url,
            "elapsed": lambda e: e.response.elapsed,
            "method": lambda e: e.request.method,
            "request body": lambda e: e.request.body,
            "errno": lambda e: e.errno,
        },
    ),
    by_httpx_after_a_redirect: (httpx.HTTPStatusError, {"history": history_of}),
    by_requests_after_a_redirect: (requests.HTTPError, {"history": history_of}),
    by_requests_unreachable: (
        requests.ConnectionError,
        {"reason": lambda e: type(e.args[0].reason).__name__, "url": lambda e: e.request.url},
    ),
    by_openai: (openai.RateLimitError, {**SDK, "code": lambda e: e.code, "type": lambda e: e.type}),
    by_openai_unreachable: (
        openai.APIConnectionError,
        {"url": lambda e: str(e.request.url), "cause": lambda e: type(e.__cause__).__name__},
    ),
    by_anthropic: (anthropic.RateLimitError, SDK),
    by_botocore: (
        botocore.exceptions.ClientError,
        {
            "code": lambda e: e.response["Error"]["Code"],
            "status": lambda e: e.response["ResponseMetadata"]["HTTPStatusCode"],
            "operation": lambda e: e.operation_name,
        },
    ),
    by_botocore_client: (_s3.exceptions.NoSuchKey, {"code": lambda e: e.response["Error"]["Code"]}),
    by_botocore_unreachable: (
        botocore.exceptions.EndpointConnectionError,
        {
            "url": lambda e: e.kwargs["endpoint_url"],
            "error": lambda e: (type(e.kwargs["error"]), e.kwargs["error"].errno),
        },
    ),
    by_pydantic: (
        pydantic.ValidationError,
        {
            "errors": lambda e: [{**line, "ctx": str(line["ctx"])} for line in e.errors()],
            "raised": lambda e: type(e.errors()[0]["ctx"]["error"]),
            "count": lambda e: e.error_count(),
            "title": lambda e: e.title,
            "json": lambda e: e.json(),
        },
    ),
    by_json: (
        json.JSONDecodeError,
        {"where": lambda e: (e.pos, e.lineno, e.colno), "doc": lambda e: e.doc, "msg": lambda e: e.msg},
    ),
    by_urllib: (
        urllib.error.HTTPError,
        {
            "code": lambda e: e.code,
            "status": lambda e: e.status,
            "reason": lambda e: e.reason,
            "header": lambda e: e.headers["Retry-After"],
            "url": lambda e: (e.url, e.filename, e.geturl()),
            "body": lambda e: json.loads(e.read()),
        },
    ),
    by_subprocess: (
        subprocess.CalledProcessError,
        {"code": lambda e: e.returncode, "out": lambda e: (e.stdout, e.stderr), "cmd": lambda e: e.cmd},
    ),
    by_file: (
        FileNotFoundError,
        {"errno": lambda e: (e.errno, e.strerror), "filename": lambda e: e.filename, "args": lambda e: e.args},
    ),
    by_import: (ModuleNotFoundError, {"name": lambda e: e.name, "msg": lambda e: e.msg}),
    by_bytes: (UnicodeDecodeError, {"where": lambda e: (e.start, e.end, e.object), "reason": lambda e: e.reason}),
    by_aiohttp: (
        aiohttp.ClientResponseError,
        {
            "status": lambda e: e.status,
            "message": lambda e: e.message,
            "header": lambda e: e.headers["Retry-After"],
            "url": lambda e: str(e.request_info.real_url),
            "method": lambda e: e.request_info.method,
        },
    ),
    by_aiohttp_unreachable: (aiohttp.ClientConnectorError, UNREACHABLE),
    with_members_of_an_enum: (
        PaymentFailed,
        {"reason": lambda e: e.reason, "is": lambda e: e.reason is Reason.DECLINED, "args": lambda e: e.args},
    ),
}


@pytest.mark.parametrize("raises", ERRORS, ids=lambda fn: fn.__name__)
def test_what_code_reads_from_an_error_is_the_same_after_a_restart(
    store: perdure.Store, file: Path, url: str, raises: Callable[[str], None]
) -> None:
    cls, reads = ERRORS[raises]
    reads = {"str": str, "class": type, **reads}
    once, seen = Once(), list[dict[str, Any]]()

    @perdure.step(name="ask")
    def ask() -> None:
        raises(url)

    @perdure.durable(name="agent")
    def agent() -> str:
        try:
            ask()
        except cls as error:
            seen.append({name: read(error) for name, read in reads.items()})
            once.interrupt()
        return "continued"

    run_id = raises.__name__
    with pytest.raises(Interrupt):
        store.run(agent, id=run_id)
    assert store.run(agent, id=run_id).result() == "continued"
    assert seen[1] == seen[0]
    stored = b"".join(path.read_bytes() for path in file.parent.iterdir())
    assert run_id.encode() in stored
    assert SECRET.encode() not in stored


# --- what is not recorded


class Broken(Exception):
    def __init__(self, **given: Any) -> None:
        super().__init__("broken")
        vars(self).update(given)


def raise_broken(url: str) -> None:
    raise Broken(socket=object(), code=7)


def raise_large(url: str) -> None:
    CLIENT.get(f"{url}/large").raise_for_status()


def raise_large_by_urllib(url: str) -> None:
    urlopen(f"{url}/large")


def raise_httpx2(url: str) -> None:
    CLIENT2.post(url, content=b"a prompt", headers={"x-api-key": SECRET}).raise_for_status()


LOST: dict[str, tuple[Callable[[str], None], Callable[[Any], Any]]] = {
    "an attribute": (raise_broken, lambda e: e.socket.recv(1)),
    "its truth": (raise_broken, lambda e: bool(e.socket)),
    "compared": (raise_broken, lambda e: e.socket == 1),
    "a large body": (raise_large, lambda e: e.response.text),
    "a large body of urllib": (raise_large_by_urllib, lambda e: e.read()),
    "the body of a request": (raise_httpx2, lambda e: e.request.content.decode()),
    "a secret header": (raise_httpx2, lambda e: e.request.headers.get("X-Api-Key")),
    "whether there is a secret header": (raise_httpx2, lambda e: "x-api-key" in e.request.headers),
    "a secret header of requests": (by_requests, lambda e: e.request.headers["authorization"]),
    "a secret header of urllib": (by_urllib, lambda e: e.headers["set-cookie"]),
    "a secret header of aiohttp": (by_aiohttp, lambda e: e.request_info.headers["Authorization"]),
    "cookies": (by_httpx, lambda e: dict(e.response.cookies)),
    "its class": (raise_broken, lambda e: isinstance(e.socket, str)),
    "the connection of httpx": (by_httpx, lambda e: e.response.extensions["network_stream"].read(1)),
    "the connection of requests": (by_requests, lambda e: e.response.raw.version),
}
WARNED: dict[Callable[[str], None], str] = {
    raise_broken: "Broken.socket (a builtins.object)",
    raise_large: "HTTPStatusError.response.body (70,000 bytes",
    raise_large_by_urllib: "HTTPError.body (more than 65,536 bytes)",
}


@pytest.mark.parametrize("what", LOST)
def test_code_that_reads_what_was_not_recorded_leaves_the_run_stuck(
    store: perdure.Store, url: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    raises, read = LOST[what]
    once, fixed, did = Once(), list[bool](), list[str]()

    @perdure.effect(name="pay", undo=lambda: did.append("refunded"))
    def pay() -> None:
        did.append("paid")

    @perdure.step(name="ask")
    def ask() -> None:
        raises(url)

    @perdure.durable(name="agent")
    def agent() -> str:
        pay()
        try:
            ask()
        except Exception as error:
            try:
                once.interrupt()
                if not fixed:
                    read(error)
            except perdure.RunStuck:  # agent loops catch everything
                return "another way"
            finally:
                getattr(error, "close", str)()  # an HTTPError of urllib holds a connection
        return "continued"

    with pytest.raises(Interrupt):
        store.run(agent, id=what)
    warning = WARNED.get(raises, "")
    assert (warning in caplog.text) if warning else ("cannot keep" not in caplog.text)
    run = store.run(agent, id=what)
    assert run.refresh().status == "stuck"
    with pytest.raises(perdure.RunStuck, match=r"not recorded(.|\n)*perdure run resume"):
        run.result()
    fixed.append(True)
    assert run.resume() == "queued"
    assert (run.result(), did) == ("continued", ["paid"])


def test_looking_at_an_incomplete_error_from_outside_of_the_run_changes_nothing(store: perdure.Store) -> None:
    class Told(Broken):
        def __str__(self) -> str:
            return f"broken at {self.socket!s}"  # type: ignore[attr-defined]

    globals()["Told"] = Told
    Told.__qualname__ = "Told"
    once = Once()

    @perdure.step(name="ask")
    def ask() -> None:
        raise Told(socket=Once.__new__(Once))

    @perdure.durable(name="agent")
    def agent() -> None:
        try:
            ask()
        finally:
            once.interrupt()

    with pytest.raises(Interrupt):
        store.run(agent, id="outside")
    run = store.run(agent, id="outside")
    with pytest.raises(perdure.RunFailed, match="broken at <") as caught:
        run.result()
    cause: Any = caught.value.__cause__
    assert "not in the journal" in repr(cause.socket)
    with pytest.raises(perdure.errors.RunError, match="was not recorded"):
        cause.socket.recv(1)
