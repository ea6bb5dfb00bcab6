"""Make the pictures of the README and of the inspector's page: `python docs/pictures.py` writes docs/pictures/*.png.

They show the store of the tests' journeys in a real browser, in light and dark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

import chromium  # noqa: E402
import inspector_agents as agents  # noqa: E402

import perdure  # noqa: E402

PICTURES = {"inbox": "/", "run": "/runs/trip-rome"}
SIZE = {"width": 1180, "height": 720}


def fill(store: perdure.Store) -> None:
    """Make runs of every kind, a schedule, deployments, snapshots, and what an operator did."""
    agents.fill(store)
    store.run(agents.travel, "rome", {"name": "Ann"}, id="trip-rome")
    store.run(agents.research, 12, id="papers-7")
    for number in range(6):
        store.start(agents.waits, number, id=f"batch-{number}", queue="slow")
    plan, memory = store.thread("plans/launch"), store.memory("users", "nadia")
    plan.save({"goal": "Launch review on 2 December", "owners": ["ann"]})
    memory.put("meal", {"fact": "Vegetarian, no mushrooms"})
    store.schedule("nightly", agents.research, "0 2 * * *", args=[20], timezone="Europe/Lisbon")
    store.schedule("digest", agents.waits, every="15m", args=[1]).pause(who="ann")
    store.ops.deploy("waits", "1", who="ann")
    store.ops.deploy("waits", "2", canary=0.05, who="ann")
    store.snapshot("before-v42", note="before version 42 of travel", who="ann")
    plan.save({"goal": "Launch review on 9 December", "owners": ["ann", "bo"]})
    memory.put("meal", {"fact": "Vegetarian, mushrooms are fine now"})
    store.thread("support/chat-1042").save({"messages": []})
    store.get_run("batch-0").cancel(who="ann")


def main(folder: Path = HERE / "pictures", pages: dict[str, str] = PICTURES) -> None:
    """Make every picture in light and dark."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        path = str(Path(place, "agent.db"))
        with perdure.open(path, durability="normal") as store:
            fill(store)
        line = [sys.executable, "-m", "perdure", "inspect", "--port", "0"]
        env = {**os.environ, "LOGNAME": "ann", "PERDURE_STORE": path}
        with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            assert server.stdout is not None
            link = server.stdout.readline().strip()
            try:
                browser = playwright.chromium.launch(**chromium.options())
                for theme in ("light", "dark"):
                    page = browser.new_page(viewport=SIZE, color_scheme=theme)
                    page.goto(link)
                    for name, url in pages.items():
                        page.goto("/".join(link.split("/")[:3]) + url)
                        page.locator("#live.on").wait_for(state="attached")
                        page.screenshot(path=folder / f"{name}-{theme}.png")
                        print(folder / f"{name}-{theme}.png")
                browser.close()
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
