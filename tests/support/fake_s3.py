"""An object store that speaks as much of the protocols of S3, GCS and Azure as obstore needs.

Objects are in memory, and signatures are not checked. GCS has S3's requests, with other names for conditions: the
emulators of GCS that were tried do not know them (docs/how-to/backup.md). `make soak` tests Azure's on Azurite too.
"""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

AZURE_ACCOUNT = "devstoreaccount1"  # of Azure's emulators


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, dict[str, bytes]]  # by bucket and name
    parts: dict[str, dict[Any, bytes]]  # by upload

    def log_message(self, format: str, *args: Any) -> None: ...

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        given = {"Content-Length": str(len(body)), "Last-Modified": "Mon, 02 Nov 2026 07:00:00 GMT", **headers}
        for name, value in given.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        place = unquote(url.path).lstrip("/").removeprefix(f"{AZURE_ACCOUNT}/")
        bucket, _, name = place.partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if bucket not in self.objects:
            self._fail(404, "NoSuchBucket")
        elif query.get("comp") == ["batch"]:
            self._azure_batch(self.objects[bucket], bucket, body)
        elif "comp" in query:
            self._azure_block(self.objects[bucket], name, query, body)
        else:
            self._object(self.objects[bucket], name, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _object(self, objects: dict[str, bytes], name: str, query: dict[str, list[str]], body: bytes) -> None:
        upload = query.get("uploadId", [""])[0]
        if self.command == "POST" and "uploads" in query:
            self.parts[name] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{escape(name)}</UploadId></InitiateMultipartUploadResult>"
            self._answer(200, text.encode())
        elif self.command == "POST" and "delete" in query:  # S3 deletes many at once
            gone = re.findall(r"<Key>([^<]+)", body.decode())
            for key in gone:
                objects.pop(unescape(key), None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in gone)
            self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        elif self.command == "DELETE":
            is_azure = objects.pop(name, None) is None or "x-ms-version" in self.headers
            self._answer(202 if is_azure else 204)
        elif self.command == "POST":
            objects[name] = b"".join(data for _, data in sorted(self.parts.pop(upload).items()))
            tag = _etag(objects[name])
            self._answer(
                200, f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>".encode()
            )
        elif self.command == "PUT" and upload:
            self.parts[upload][int(query["partNumber"][0])] = body
            self._answer(200, ETag=_etag(body))
        elif self.command == "PUT" and self._must_be_new() and name in objects:
            self._fail(409 if "x-ms-blob-type" in self.headers else 412, "PreconditionFailed")
        elif self.command == "PUT":
            objects[name] = body
            self._answer(201 if "x-ms-blob-type" in self.headers else 200, ETag=_etag(body))
        elif name not in objects:
            self._fail(404, "NoSuchKey")
        else:
            self._answer(200, objects[name], ETag=_etag(objects[name]))

    def _must_be_new(self) -> bool:
        return self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0"

    def _azure_block(self, objects: dict[str, bytes], name: str, query: dict[str, list[str]], body: bytes) -> None:
        """Take a part of a blob, or the list of parts that makes it."""
        blocks = self.parts.setdefault(name, {})
        if query["comp"] == ["block"]:
            blocks[query["blockid"][0]] = body
        else:
            objects[name] = b"".join(
                blocks[block] for block in re.findall(r"<(?:Uncommitted|Latest)>([^<]+)", body.decode())
            )
        self._answer(201, ETag=_etag(body))

    def _azure_batch(self, objects: dict[str, bytes], bucket: str, body: bytes) -> None:
        """Delete several blobs: each is a request of its own in the body."""
        parts = ""
        for number, path in enumerate(re.findall(r"DELETE (\S+) HTTP", body.decode())):
            objects.pop(unquote(urlsplit(path).path).partition(f"{bucket}/")[2], None)
            head = f"Content-Type: application/http\r\nContent-ID: {number}"
            parts += f"--x\r\n{head}\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n\r\n"
        self._answer(202, f"{parts}--x--".encode(), Content_Type="multipart/mixed; boundary=x")


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@contextmanager
def fake_s3(*buckets: str) -> Iterator[str]:
    """The URL of a server with these buckets, empty."""
    state: dict[str, Any] = {"objects": {bucket: {} for bucket in buckets}, "parts": {}}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), state)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
