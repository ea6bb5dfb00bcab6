"""A model over HTTP that follows a script: OpenAI's chat completions and Anthropic's messages, whole or streamed.

    with ModelServer() as model:
        subprocess.run([…], env={**os.environ, **model.environment})

A request gets the turn of the script whose number is that of the assistant's messages so far. Ids of tool calls differ
in every request, as those of real models do. What the real APIs refuse is refused with 400: a tool call without its
answer, an answer without its call, a field that they do not know.
"""

from __future__ import annotations

import http.server
import itertools
import json
import re
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

# Turns: tool calls, as names and arguments, or a text.
SCRIPT: list[Any] = [
    [("search", {"city": "Lisbon"})],
    [("book", {"flight": "Lisbon 12:40"})],
    "You fly to Lisbon at 12:40.",
]
USAGE = (120, 17)  # tokens of every request and of every answer
_BLOCKS = {
    "text": {"type", "text"},
    "tool_use": {"type", "id", "name", "input"},
    "tool_result": {"type", "tool_use_id", "content", "is_error"},
}


class Refused(Exception):
    """What the real API would answer with 400."""


class Request(NamedTuple):
    """A request that the model received."""

    api: str  # "openai" or "anthropic"
    turn: int
    body: dict[str, Any]


class ModelServer(http.server.ThreadingHTTPServer):
    """The server, on a thread of this process, for `with`."""

    daemon_threads = True

    def __init__(self, script: list[Any] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = SCRIPT if script is None else script
        self.requests: list[Request] = []
        self.numbers = itertools.count(1)
        self.hold_after: int | None = None  # how many words of a text are sent before it waits for `released`
        self.held, self.released = threading.Event(), threading.Event()

    def __enter__(self) -> ModelServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed are expected."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the clients of both providers come here."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "sk-test",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "sk-ant-test",
        }

    def turns(self) -> list[int]:
        """The turns that were asked for, in the order of the requests."""
        return [request.turn for request in self.requests]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ModelServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = next(self.server.numbers)
        try:
            if self.path == "/v1/chat/completions":
                self._chat(number, body)
            elif self.path == "/v1/messages":
                self._messages(number, body)
            else:
                self._answer(404, {"error": {"type": "not_found", "message": self.path}})
        except Refused as error:
            self._answer(400, {"type": "error", "error": {"type": "invalid_request_error", "message": str(error)}})

    def _turn(self, api: str, body: dict[str, Any]) -> Any:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        self.server.requests.append(Request(api, turn, body))
        offered = [tool.get("function", tool)["name"] for tool in body.get("tools", ())]
        said = self.server.script[turn]
        if not isinstance(said, str) and any(name not in offered for name, _ in said):
            raise Refused(f"the script calls {said}, and the tools are {offered}")
        return said

    # --- OpenAI

    def _chat(self, number: int, body: dict[str, Any]) -> None:
        if self.headers["Authorization"] != "Bearer sk-test":
            self._answer(401, {"error": {"type": "invalid_api_key", "message": "Incorrect API key"}})
            return
        _check_chat(body["messages"])
        said = self._turn("openai", body)
        usage = {"prompt_tokens": USAGE[0], "completion_tokens": USAGE[1], "total_tokens": sum(USAGE)}
        about = {"id": f"chatcmpl-{number}", "created": 1_790_000_000, "model": f"{body['model']}-2026-10-01"}
        if isinstance(said, str):
            message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
            finish = "stop"
        else:
            message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": _chat_calls(number, said)}
            finish = "tool_calls"
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            self._answer(200, {**about, "object": "chat.completion", "choices": [choice], "usage": usage})
            return
        about["object"] = "chat.completion.chunk"
        self._begin_stream()
        for delta in self._chat_deltas(message):
            self._event(None, {**about, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self._event(None, {**about, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if body.get("stream_options", {}).get("include_usage"):
            self._event(None, {**about, "choices": [], "usage": usage})
        self._send(b"data: [DONE]\n\n")
        self._send(b"")

    def _chat_deltas(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"role": "assistant", "content": "" if message["content"] else None, "refusal": None}
        for word in self._words(message["content"] or ""):
            yield {"content": word}
        for index, call in enumerate(message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            yield {"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]}
            for part in re.findall(r".{1,9}", arguments):
                yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}

    # --- Anthropic

    def _messages(self, number: int, body: dict[str, Any]) -> None:
        keys = {self.headers["X-Api-Key"], self.headers["Authorization"]}  # older and newer clients
        if not keys & {"sk-ant-test", "Bearer sk-ant-test"} or not self.headers["anthropic-version"]:
            refused = {"type": "authentication_error", "message": "invalid x-api-key"}
            self._answer(401, {"type": "error", "error": refused})
            return
        if "max_tokens" not in body:
            raise Refused("max_tokens: Field required")
        _check_messages(body["messages"])
        said = self._turn("anthropic", body)
        if isinstance(said, str):
            blocks, stop = [{"type": "text", "text": said}], "end_turn"
        else:
            stop = "tool_use"
            blocks = [
                {"type": "tool_use", "id": f"toolu_{number}_{at}", "name": name, "input": arguments}
                for at, (name, arguments) in enumerate(said)
            ]
        usage = {"input_tokens": USAGE[0], "output_tokens": USAGE[1]}
        whole = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body["model"]}
        if not body.get("stream"):
            ended = {"stop_reason": stop, "stop_sequence": None, "usage": usage}
            self._answer(200, {**whole, "content": blocks, **ended})
            return
        self._begin_stream()
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        self._event("message_start", {"message": begun})
        for index, block in enumerate(blocks):
            empty = {**block, "text": ""} if block["type"] == "text" else {**block, "input": {}}
            self._event("content_block_start", {"index": index, "content_block": empty})
            for delta in self._message_deltas(block):
                self._event("content_block_delta", {"index": index, "delta": delta})
            self._event("content_block_stop", {"index": index})
        ended = {"stop_reason": stop, "stop_sequence": None}
        self._event("message_delta", {"delta": ended, "usage": {"output_tokens": USAGE[1]}})
        self._event("message_stop", {})
        self._send(b"")

    def _message_deltas(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if block["type"] == "text":
            for word in self._words(block["text"]):
                yield {"type": "text_delta", "text": word}
        else:
            for part in re.findall(r".{1,9}", json.dumps(block["input"])):
                yield {"type": "input_json_delta", "partial_json": part}

    # --- both

    def _words(self, text: str) -> Iterator[str]:
        for at, word in enumerate(re.findall(r"\s*\S+", text)):
            if at == self.server.hold_after:
                self.server.held.set()
                self.server.released.wait(60)
            yield word

    def _answer(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, name: str | None, data: dict[str, Any]) -> None:
        """Send a server-sent event. Anthropic's have a name, which is also the type of its data."""
        if name is None:
            self._send(f"data: {json.dumps(data)}\n\n".encode())
        else:
            self._send(f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode())

    def _send(self, text: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self.wfile.flush()


def _chat_calls(number: int, calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{number}_{at}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for at, (name, arguments) in enumerate(calls)
    ]


def _check_chat(messages: list[dict[str, Any]]) -> None:
    open_calls: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                raise Refused("messages with role 'tool' must be a response to a preceding message with 'tool_calls'")
            open_calls.remove(message["tool_call_id"])
        elif open_calls:
            raise Refused(f"these tool_calls have no response messages: {sorted(open_calls)}")
        for call in message.get("tool_calls", ()):
            if unknown := (call.keys() | call["function"].keys()) - {"id", "type", "function", "name", "arguments"}:
                raise Refused(f"unknown parameter: {sorted(unknown)}")
            open_calls.add(call["id"])
    if open_calls:
        raise Refused(f"these tool_calls have no response messages: {sorted(open_calls)}")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    open_calls: set[str] = set()
    for message in messages:
        if unknown := message.keys() - {"role", "content"}:
            raise Refused(f"messages: {sorted(unknown)}: Extra inputs are not permitted")
        blocks = message["content"] if isinstance(message["content"], list) else []
        for block in blocks:
            if unknown := block.keys() - _BLOCKS[block["type"]]:
                raise Refused(f"messages.content: {sorted(unknown)}: Extra inputs are not permitted")
        answered = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        if answered != open_calls:
            raise Refused(f"`tool_use` ids without `tool_result` blocks immediately after: {sorted(open_calls)}")
        open_calls = {block["id"] for block in blocks if block["type"] == "tool_use"}
    if open_calls:
        raise Refused(f"`tool_use` ids without `tool_result` blocks immediately after: {sorted(open_calls)}")
