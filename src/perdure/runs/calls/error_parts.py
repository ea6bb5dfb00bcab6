"""Recording and rebuilding the parts of errors that are no plain data, such as the responses of HTTP clients.

An object is recognised by the name of its class, so no client is imported. Secrets and bodies that are too large are
not recorded: `Lost` replaces them. Code that reads a `Lost` could decide differently than in its first execution. So
reading one leaves the run stuck, and nothing is undone.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from perdure.errors import RunError, RunStuck
from perdure.runs.execution.scope import current

BODY_MAX_BYTES = 65_536
_SECRET_HEADERS = {
    "api-key", "authorization", "cookie", "proxy-authorization", "set-cookie", "x-amz-security-token", "x-api-key",
    "x-goog-api-key",
}  # fmt: skip
_LOOKUPS = ("__getitem__", "__contains__", "get", "get_list", "get_all", "getall", "getone")  # take a header's name
_PLAIN = (bytes, str, int, float, bool, dict)
_GUARDED = "__perdure_guarded__"  # a class of rebuilt headers has the names of the secret ones
_OPERATORS = """getattr setattr delattr getitem setitem delitem call bool len iter next reversed contains eq ne lt le
    gt ge hash str format bytes int float index complex round fspath add radd sub rsub mul rmul truediv floordiv mod
    rmod pow and or xor neg pos abs invert enter exit aenter aexit await aiter anext"""


class Lost:
    """Placeholder for a part of an error that was not recorded. Every use of it calls `use_lost`."""

    __slots__ = ("by_rule", "text", "what")
    by_rule: bool  # such parts are never recorded, so recording the error logs no warning
    text: str | None  # the repr of the part, if it was recorded
    what: str

    def __init__(self, what: str, *, by_rule: bool = False, text: str | None = None) -> None:
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "by_rule", by_rule)
        object.__setattr__(self, "text", text)

    def __repr__(self) -> str:
        return self.text or f"<not in the journal: {self.what}>"

    @property  # type: ignore[misc]
    def __class__(self) -> NoReturn:  # type: ignore[override]  # `isinstance` reads it; `type` does not
        use_lost(self.what)


def use_lost(what: str) -> NoReturn:
    """Halt the run and raise RunStuck, because its code reads what was not recorded. Outside a run, raise RunError."""
    scope = current.get()
    if scope is None:
        raise RunError(f"{what} was not recorded with the error; the journal keeps plain data and HTTP responses")
    run = scope.execution.row.id
    stuck = RunStuck(
        f"the code of run {run!r} reads {what}, which was not recorded with the error. Nothing was undone. Let it "
        "decide by what is recorded (the class of the error, its text, a status), or read it inside the step and raise "
        f"an error of your own that has it; then `perdure run resume {run}`"
    )
    scope.execution.halt(stuck)
    raise stuck


def _use(lost: Lost, *_: object, **__: object) -> NoReturn:
    use_lost(lost.what)


for _name in _OPERATORS.split():
    setattr(Lost, f"__{_name}__", _use)


class Kind(NamedTuple):
    """How objects of a class are recorded and rebuilt."""

    module: str  # where the class is imported from
    keep: Callable[[Any], dict[str, Any]]
    make: Callable[[Any, dict[str, Any]], Any]  # takes the class and the result of `keep`


def kind_of(value: object) -> str | None:
    """Return the name of an object's kind; None if KINDS has none.

    The bases of an error's class do not count: an `except` would not match an error of a base class.
    """
    for cls in type(value).__mro__[:1] if isinstance(value, BaseException) else type(value).__mro__:
        name = f"{str(cls.__module__).partition('.')[0]}:{cls.__qualname__}"
        if name in KINDS:
            return name
    return None


def make(kind: str, parts: dict[str, Any]) -> Any:
    """Rebuild an object of a kind. Raises ImportError if its library is missing, and any error of that library."""
    known = KINDS[kind]
    return known.make(getattr(import_module(known.module), kind.partition(":")[2]), parts)


# --- headers and bodies


def _headers(headers: Any) -> dict[str, Any]:
    items = headers.multi_items() if hasattr(headers, "multi_items") else headers.items()
    pairs = [[str(name), str(value)] for name, value in items]
    lost = getattr(type(headers), _GUARDED, ())  # of headers that were rebuilt
    secret = sorted({*lost, *(name.lower() for name, _ in pairs if name.lower() in _SECRET_HEADERS)})
    return {"pairs": [pair for pair in pairs if pair[0].lower() not in _SECRET_HEADERS], "secret": secret}


def _guarded(cls: Any, secret: list[str]) -> Any:
    """Return a class of headers in which looking up one of `secret` leaves the run stuck."""
    if not secret:
        return cls

    def guard(method: Any) -> Any:
        def look(self: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(name, str) and name.lower() in secret:
                use_lost(f"the header {name!r}, which may hold a secret and")
            return method(self, name, *args, **kwargs)

        return look

    lookups = {name: guard(getattr(cls, name)) for name in _LOOKUPS if hasattr(cls, name)}
    return type(cls.__name__, (cls,), {_GUARDED: tuple(secret), **lookups})


def _made_headers(cls: Any, kept: dict[str, Any]) -> Any:
    return _guarded(cls, kept["secret"])([(str(name), str(value)) for name, value in kept["pairs"]])


def _body(content: Any) -> Any:
    """Return the body of a response, or Lost instead of one that is too large."""
    if type(content) is Lost or len(content) <= BODY_MAX_BYTES:
        return content
    return Lost(f"{len(content):,} bytes, of which none are kept; up to {BODY_MAX_BYTES:,} would be")


def _request(request: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {
        "method": str(request.method),
        "url": str(request.url),
        "headers": _headers(request.headers),
    }
    kept["extensions"] = _extensions(getattr(request, "extensions", {}))
    content = getattr(request, "body", getattr(request, "_content", True))
    # The body may hold a password. A prompt in it is already recorded among the step's arguments.
    is_kept = type(content) is not Lost and not content
    kept["body"] = content if is_kept else Lost("bodies of requests are not kept", by_rule=True)
    return kept


def _extensions(extensions: Any) -> dict[str, Any]:
    """Return what httpx adds to a request or a response, such as the reason of the status, without connections."""
    return {
        str(name): value if type(value) in _PLAIN else Lost("connections are not kept", by_rule=True)
        for name, value in extensions.items()
    }


def _history(response: Any, keep: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]] | Lost:
    """Return the redirects before a response. Their own histories are parts of it, and are not kept."""
    if type(response.history) is Lost:
        return response.history
    earlier = [keep(each) for each in response.history]
    for each in earlier[1:]:
        each["history"] = Lost("histories of redirects are not kept", by_rule=True)
    return earlier


def _cookies_are_lost(kept: dict[str, Any]) -> bool:
    return "set-cookie" in kept["headers"]["secret"]


# --- httpx, and httpx2, which many SDKs use


def _httpx_response(response: Any) -> dict[str, Any]:
    kept = {"status": response.status_code, "headers": _headers(response.headers)}
    request, content = getattr(response, "_request", None), getattr(response, "_content", None)
    kept["request"] = None if request is None else _request(request)
    kept["body"] = None if content is None else _body(content)
    kept["encoding"] = response.encoding if type(kept["body"]) is bytes else None
    kept["elapsed"], kept["bytes"] = _elapsed(response), response.num_bytes_downloaded
    kept["next"] = None if response.next_request is None else _request(response.next_request)
    kept["extensions"], kept["history"] = _extensions(response.extensions), _history(response, _httpx_response)
    return kept


def _elapsed(response: Any) -> timedelta | None:
    try:
        elapsed: timedelta = response.elapsed
    except RuntimeError:  # the response was not read to its end
        return None
    return elapsed


def _made_httpx_request(cls: Any, kept: dict[str, Any]) -> Any:
    request = cls(kept["method"], kept["url"], extensions=kept["extensions"])
    request.headers = _made_headers(type(request.headers), kept["headers"])
    request._content = kept["body"]
    return request


def _made_httpx_response(cls: Any, kept: dict[str, Any]) -> Any:
    request_cls = import_module(cls.__module__).Request
    request, following = (
        None if part is None else _made_httpx_request(request_cls, part) for part in (kept["request"], kept["next"])
    )
    response = cls(kept["status"], request=request, extensions=kept["extensions"])
    response.next_request, response._num_bytes_downloaded = following, kept["bytes"]
    response.history = _made_history(cls, kept["history"], _made_httpx_response)
    if kept["elapsed"] is not None:
        response._elapsed = kept["elapsed"]
    if kept["encoding"] is not None:
        response._encoding = kept["encoding"]
    response.headers = _made_headers(type(response.headers), kept["headers"])
    if _cookies_are_lost(kept):
        response._cookies = Lost("the cookies of the response")
    if kept["body"] is None:
        del response._content  # it was not read: reading it raises ResponseNotRead, as in the first execution
        response.is_stream_consumed = False
    else:
        response._content = kept["body"]  # already decoded, whatever encoding the headers name
    return response


def _made_history(cls: Any, kept: Any, make_again: Callable[[Any, dict[str, Any]], Any]) -> Any:
    return kept if type(kept) is Lost else [make_again(cls, each) for each in kept]


# --- requests


class _LostConnection:
    """A connection that was not recorded. Its use leaves the run stuck; closing it is harmless."""

    def close(self) -> None: ...

    release_conn = close

    def __getattr__(self, name: str) -> NoReturn:
        use_lost("the connection of the response")


def _requests_response(response: Any) -> dict[str, Any]:
    kept = {name: getattr(response, name) for name in ("url", "reason", "encoding")}
    kept |= {"status": response.status_code, "headers": _headers(response.headers)}
    kept["elapsed"], kept["history"] = response.elapsed, _history(response, _requests_response)
    kept["request"] = None if response.request is None else _request(response.request)
    content = response._content  # False if it was not read, None if there is none
    kept["body"] = Lost("it was not read") if content is False else _body(b"" if content is None else content)
    return kept


def _made_requests_request(cls: Any, kept: dict[str, Any]) -> Any:
    request = cls()
    request.method, request.url, request.body = kept["method"], kept["url"], kept["body"]
    request.headers = _made_headers(import_module("requests.structures").CaseInsensitiveDict, kept["headers"])
    return request


def _made_requests_response(cls: Any, kept: dict[str, Any]) -> Any:
    response = cls()
    response.status_code, response.url, response.reason = kept["status"], kept["url"], kept["reason"]
    response.encoding, response.elapsed = kept["encoding"], kept["elapsed"]
    response.history = _made_history(cls, kept["history"], _made_requests_response)
    response.raw, response.connection = _LostConnection(), Lost("the connection of the response")
    response.headers = _made_headers(type(response.headers), kept["headers"])
    if _cookies_are_lost(kept):
        response.cookies = Lost("the cookies of the response")
    if kept["request"] is not None:
        response.request = _made_requests_request(import_module("requests").PreparedRequest, kept["request"])
    response._content, response._content_consumed = kept["body"], True
    return response


# --- errors that only their own library can build


def _validation_error(error: Any) -> dict[str, Any]:
    title, lines, *how = error.__reduce__()[1]  # alone says what was validated (Python or JSON) and whether inputs show
    return {"title": title, "lines": [_validation_line(line) for line in lines], "how": how}


def _validation_line(line: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {key: line[key] for key in ("type", "loc", "input", "ctx") if key in line}
    if not isinstance(line["type"], str):  # a custom error
        kept |= {"type": line["type"].type, "template": line["type"].message_template}
    return kept | {"shown": _shown(line["input"])}


def _shown(value: Any) -> list[str]:
    """Return what the text of a ValidationError says of an input: its class, and its first and last 25 characters."""
    try:
        text = repr(value)
    except Exception:  # shown as pydantic does
        text = f"<unprintable {type(value).__qualname__} object>"
    return [type(value).__qualname__, text if len(text) <= 100 else text[:50] + text[-50:]]


def _made_validation_error(cls: Any, kept: dict[str, Any]) -> Any:
    core = import_module("pydantic_core")
    lines = []
    for line in kept["lines"]:
        made_line = {key: line[key] for key in ("type", "input", "ctx") if key in line} | {"loc": tuple(line["loc"])}
        if "template" in line:
            made_line["type"] = core.PydanticCustomError(line["type"], line["template"], line.get("ctx"))
        if type(line["input"]) in (Lost, dict, list, tuple) and _shown(line["input"]) != line["shown"]:
            name, text = line["shown"]  # it is lost, or a part of it is: the error's text must be the same
            made_line["input"] = type(name, (Lost,), {"__slots__": ()})("the input of a ValidationError", text=text)
        lines.append(made_line)
    error = cls.from_exception_data(kept["title"], lines, *kept["how"])
    error.args = ()
    return error


class _Chained(io.RawIOBase):
    """A stream that first returns the bytes already read, then those of the original stream."""

    def __init__(self, begun: bytes, stream: Any) -> None:
        self._begun, self._stream = io.BytesIO(begun), stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._begun.read(len(buffer)) or self._stream.read(len(buffer)) or b""
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        super().close()
        self._stream.close()


def _urllib_error(error: Any) -> dict[str, Any]:
    kept = {"url": error.filename, "code": error.code, "msg": error.msg, "body": None}
    kept["headers"] = None if error.hdrs is None else _headers(error.hdrs)
    if error.fp is not None:
        begun = error.fp.read(BODY_MAX_BYTES + 1)
        kept["body"] = begun if len(begun) <= BODY_MAX_BYTES else Lost(f"more than {BODY_MAX_BYTES:,} bytes")
        error.fp = error.file = io.BufferedReader(_Chained(begun, error.fp))  # for the code that catches the error
    return kept


class _LostStream(io.RawIOBase):
    """A body that was not recorded. Reading it leaves the run stuck; closing it is harmless."""

    def __init__(self, what: str) -> None:
        self._what = what

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        use_lost(self._what)


def _made_urllib_error(cls: Any, kept: dict[str, Any]) -> Any:
    headers, body = kept["headers"], kept["body"]
    if headers is not None:
        message = _guarded(import_module("http.client").HTTPMessage, headers["secret"])()
        for name, value in headers["pairs"]:
            message[name] = value
        headers = message
    stream = _LostStream(body.what) if type(body) is Lost else body if body is None else io.BytesIO(body)
    return cls(kept["url"], kept["code"], kept["msg"], headers, stream)


# --- aiohttp


def _fields(value: Any) -> dict[str, Any]:
    return {"fields": list(value)}


def _made_of_fields(cls: Any, kept: dict[str, Any]) -> Any:
    return cls(*kept["fields"])


def _made_multidict(cls: Any, kept: dict[str, Any]) -> Any:
    return _guarded(cls, kept["secret"])(
        import_module("multidict").CIMultiDict([tuple(pair) for pair in kept["pairs"]])
    )


KINDS: dict[str, Kind] = {
    **{
        f"{client}:{name}": Kind(client, keep, make_again)
        for client in ("httpx", "httpx2")
        for name, keep, make_again in (
            ("Response", _httpx_response, _made_httpx_response),
            ("Request", _request, _made_httpx_request),
        )
    },
    "requests:Response": Kind("requests", _requests_response, _made_requests_response),
    "requests:PreparedRequest": Kind("requests", _request, _made_requests_request),
    "pydantic_core:ValidationError": Kind("pydantic_core", _validation_error, _made_validation_error),
    "urllib:HTTPError": Kind("urllib.error", _urllib_error, _made_urllib_error),
    "yarl:URL": Kind("yarl", lambda url: {"url": str(url)}, lambda cls, kept: cls(kept["url"])),
    "multidict:CIMultiDictProxy": Kind("multidict", _headers, _made_multidict),
    "aiohttp:RequestInfo": Kind("aiohttp", _fields, _made_of_fields),
    "aiohttp:ConnectionKey": Kind("aiohttp.client_reqrep", _fields, _made_of_fields),
}
