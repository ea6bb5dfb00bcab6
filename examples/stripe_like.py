"""Make one charge and send one parcel, although the answers to both requests get lost.

The payment API takes an idempotency key, like Stripe's: it performs requests with the same key once, so the effect may
simply send the request again. The parcel service takes no keys: there, `reconcile` looks for the order instead.

python examples/stripe_like.py
"""

from __future__ import annotations

import json
import tempfile
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import perdure
from perdure import outcome

charges: dict[str, dict[str, Any]] = {}  # by idempotency key
parcels: list[dict[str, Any]] = []
lost: set[str] = set()


class Shop(BaseHTTPRequestHandler):
    """Both services. Each acts at once, and its first answer gets lost."""

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/charges":
            key = self.headers["Idempotency-Key"]
            seen = key in charges
            charge = charges.setdefault(key, {"id": f"ch_{len(charges) + 1}", **order})
            print(f"  payments: {'known key, the charge of before' if seen else 'charged'}: {charge['id']}")
            self.answer(charge)
        else:
            parcels.append({"id": f"parcel-{len(parcels) + 1}", **order})
            print(f"  parcels:  sent {parcels[-1]['id']}")
            self.answer(parcels[-1])

    def do_GET(self) -> None:
        matching = [parcel for parcel in parcels if self.path.endswith(f"order={parcel['order']}")]
        print(f"  parcels:  looked up, found {len(matching)}")
        self.answer(matching)

    def answer(self, value: object) -> None:
        if self.command == "POST" and self.path not in lost:
            lost.add(self.path)
            print("  network:  the answer is lost")
            self.close_connection = True
            return
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Shop)


def call(path: str, order: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Any:
    data = None if order is None else json.dumps(order).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", data, headers or {})
    with urllib.request.urlopen(request, timeout=1) as reply:
        return json.loads(reply.read())


# The API honours the key, so a repeated request does no harm. Perdure repeats it when the first can no longer arrive.
@perdure.effect(on_doubt="retry", timeout_s=1)
def charge(order: str, cents: int) -> str:
    headers = {"Idempotency-Key": str(perdure.idempotency_key())}
    return str(call("/v1/charges", {"order": order, "amount": cents}, headers)["id"])


def find_parcel(key: perdure.IdempotencyKey, order: str) -> outcome.Done | outcome.NotDone | outcome.Unknown:
    try:
        shipped = call(f"/parcels?order={order}")
    except urllib.error.URLError as error:
        return outcome.Unknown(f"the parcel service cannot be asked: {error}")
    return outcome.Done(shipped[0]["id"]) if shipped else outcome.NotDone()


@perdure.effect(reconcile=find_parcel, timeout_s=1)
def ship(order: str) -> str:
    return str(call("/parcels", {"order": order})["id"])


@perdure.durable
def sell(order: str, cents: int) -> dict[str, str]:
    return {"charge": charge(order, cents), "parcel": ship(order)}


def main() -> None:
    with server, tempfile.TemporaryDirectory() as folder, perdure.open(f"{folder}/shop.db") as store:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            run = store.run(sell, "order-7", 4200, id="order-7")
            print(f"the run is {run.status}: {run.result()}")
            print(f"charges: {len(charges)}, parcels: {len(parcels)}")
        finally:
            server.shutdown()
            serving.join()


if __name__ == "__main__":
    main()
