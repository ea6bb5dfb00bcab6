"""Open one GitHub issue for each failed build, although the answer of GitHub gets lost.

    python examples/github_issues.py                     # against a stand-in for GitHub on this machine
    GITHUB_TOKEN=… python examples/github_issues.py me/sandbox     # against GitHub itself

GitHub takes no idempotency keys. So the effect writes its key into the issue, in a comment that readers do not see, and
`reconcile` looks for that comment before anything is tried again. Undoing the run closes the issue.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import perdure
from perdure import outcome

issues: list[dict[str, Any]] = []  # of the stand-in


class Hub(BaseHTTPRequestHandler):
    """A stand-in for GitHub's API. It opens the first issue, and its answer gets lost."""

    def do_POST(self) -> None:
        issues.append({"number": len(issues) + 1, "state": "open", **self.body()})
        print(f"  github: opened #{len(issues)}: {issues[-1]['title']}")
        if len(issues) == 1:
            print("  network: the answer is lost")
            self.close_connection = True
        else:
            self.answer(issues[-1])

    def do_GET(self) -> None:
        print(f"  github: listed {len(issues)}")
        self.answer(issues)

    def do_PATCH(self) -> None:
        issue = issues[int(self.path.rpartition("/")[2]) - 1]
        issue.update(self.body())
        print(f"  github: #{issue['number']} is {issue['state']}")
        self.answer(issue)

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
TOKEN = os.environ.get("GITHUB_TOKEN")
API = "https://api.github.com" if TOKEN else f"http://127.0.0.1:{server.server_port}"


def call(method: str, path: str, value: dict[str, Any] | None = None) -> Any:
    headers = {"Accept": "application/vnd.github+json", "Content-Type": "application/json"}
    if TOKEN:
        headers["Authorization"] = f"Bearer {TOKEN}"
    data = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(f"{API}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=5) as reply:
        return json.loads(reply.read())


def mark(key: perdure.IdempotencyKey) -> str:
    return f"<!-- perdure {key} -->"


def find_issue(key: perdure.IdempotencyKey, repository: str) -> outcome.Done | outcome.NotDone | outcome.Unknown:
    """Look for the issue with the key among the newest hundred. GitHub's search would lag behind."""
    try:
        newest = call("GET", f"/repos/{repository}/issues?state=all&per_page=100")
    except urllib.error.URLError as error:
        return outcome.Unknown(f"GitHub cannot be asked: {error}")
    numbers = [issue["number"] for issue in newest if mark(key) in (issue.get("body") or "")]
    return outcome.Done(numbers[0]) if numbers else outcome.NotDone()


@perdure.effect(on_doubt="retry", timeout_s=5)  # closing twice does no harm
def close_issue(repository: str, result: int) -> None:
    call("PATCH", f"/repos/{repository}/issues/{result}", {"state": "closed"})


@perdure.effect(reconcile=find_issue, undo=close_issue, timeout_s=5)
def open_issue(repository: str, title: str, text: str, key: perdure.IdempotencyKey) -> int:
    issue = {"title": title, "body": f"{text}\n\n{mark(key)}"}
    return int(call("POST", f"/repos/{repository}/issues", issue)["number"])


@perdure.durable
def report(repository: str, build: str) -> int:
    return open_issue(repository, f"Build {build} fails", "The tests of `login` fail since this build.")


def main() -> None:
    repository = sys.argv[1] if TOKEN else "acme/web"
    with server, tempfile.TemporaryDirectory() as folder, perdure.open(f"{folder}/agent.db") as store:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            for build in ("41", "42", "41"):  # 41 comes again: it is the same run
                print(f"build {build}: issue #{store.run(report, repository, build, id=f'build-{build}').result()}")
            store.get_run("build-42").undo()
            store.run(report, repository, "42", id="build-42")
            print("build 42:", store.get_run("build-42").status)
        finally:
            server.shutdown()
            serving.join()


if __name__ == "__main__":
    main()
