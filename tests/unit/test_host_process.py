"""Perdure leaves the process that uses it as it was: a program with every part of it in use, in a process of its own.

The program takes a picture of the process, uses threads, runs, a LangGraph graph, memory and a sandbox, closes the
store, and takes the picture again. It also notes each call from Perdure of a function that changes the whole process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = r'''
import asyncio, atexit, builtins, concurrent.futures.thread, contextlib, gc, http.client, json, locale, logging, os
import random, signal, socket, sqlite3, ssl, subprocess, sys, threading, time, traceback, uuid, warnings
import numpy
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

folder = sys.argv[1]
MODULES = (asyncio, asyncio.base_events, asyncio.events, asyncio.tasks, atexit, builtins, concurrent.futures.thread, gc,
           http.client, json, logging, os, random, signal, socket, sqlite3, ssl, subprocess, sys, threading, time, uuid,
           warnings)


def functions():
    """Return every function and class of these modules, and the methods of the classes."""
    seen = {}
    for module in MODULES:
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("__"):
                seen[module.__name__, name] = id(value)
            if isinstance(value, type):
                for method, code in vars(value).items():
                    if callable(code):
                        seen[module.__name__, name, method] = id(code)
    return seen


def picture():
    perdure_log = logging.getLogger("perdure")
    return {
        "functions": functions(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug(), list(gc.callbacks)),
        "limits": (sys.getswitchinterval(), sys.getrecursionlimit(), threading.stack_size()),
        "timeout": socket.getdefaulttimeout(),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace(),
                  sys.getprofile(), sys.get_asyncgen_hooks(), sys.breakpointhook),
        "imports": (list(sys.path), list(sys.meta_path), list(sys.path_hooks), sys.modules["__main__"]),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "logging": (logging.root.level, list(logging.root.handlers), logging.raiseExceptions, logging.getLoggerClass(),
                    perdure_log.level, list(perdure_log.handlers), perdure_log.propagate, perdure_log.disabled),
        "warnings": list(warnings.filters),
        "environment": (dict(os.environ), os.getcwd(), locale.setlocale(locale.LC_ALL)),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "policy": asyncio.get_event_loop_policy(),
    }


calls = []


def note(owner, name):
    """Note who calls a function that changes the whole process, if that is Perdure."""
    function = getattr(owner, name)

    def noting(*args, **kwargs):
        if sys._getframe(1).f_globals.get("__name__", "").startswith("perdure"):
            calls.append(f"{owner.__name__}.{name}: " + traceback.format_stack(limit=2)[0])
        return function(*args, **kwargs)

    setattr(owner, name, noting)


for owner, names in {
    gc: "collect disable enable freeze unfreeze set_threshold set_debug",
    signal: "signal set_wakeup_fd setitimer alarm",
    atexit: "register",
    sys: "settrace setprofile setswitchinterval setrecursionlimit addaudithook set_asyncgen_hooks",
    threading: "settrace setprofile stack_size",
    logging: "basicConfig disable setLoggerClass captureWarnings",
    warnings: "filterwarnings simplefilter resetwarnings",
    socket: "setdefaulttimeout",
    random: "seed random getrandbits",
    os: "putenv chdir umask nice",
    locale: "setlocale",
}.items():
    for name in names.split():
        note(owner, name)


seen_disabled = []
frozen = gc.get_freeze_count()  # Python 3.12 itself freezes some
ended = threading.Event()


def watch():
    """See whether another thread finds the collector switched off, or a part of the heap frozen."""
    while not ended.is_set():
        if not gc.isenabled() or gc.get_freeze_count() != frozen:
            seen_disabled.append(True)
        time.sleep(0)


random.seed(1)
before, drawn = picture(), random.getstate()

import perdure


@perdure.step
async def double(number):
    return 2 * number


@perdure.effect
def send(text):
    return text.upper()


@perdure.durable
def talks(text):
    perdure.gather(lambda: send(text), lambda: send(text + "!"))
    return send(text)


@perdure.durable
async def counts(number):
    return sum(await asyncio.gather(*(double(each) for each in range(number))))


async def on_a_loop(store):
    loop = asyncio.get_running_loop()
    hooks = sys.get_asyncgen_hooks()
    run = await store.arun(counts, 5, id="counts")
    assert await run.aresult() == 20
    assert loop.get_task_factory() is None
    assert loop.get_exception_handler() is None and sys.get_asyncgen_hooks() == hooks
    await store.thread("t").asave({"n": 3})


def chat(store):
    from perdure.langgraph import PerdureSaver

    def answer(state):
        return {"messages": [AIMessage("answer " * 20) for _ in range(40)]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    with PerdureSaver(store) as saver:
        graph = builder.compile(checkpointer=saver)
        config = {"configurable": {"thread_id": "chat"}}
        for _ in range(8):
            graph.invoke({"messages": [HumanMessage("question")]}, config)
        history = list(graph.get_state_history(config))
        assert len(history[0].values["messages"]) == 8 * 41
        return history


watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
with perdure.open(os.path.join(folder, "host.db")) as store:
    store.thread("t").save({"n": 1})
    store.thread("t").save({"big": [{"text": "x" * 20, "n": n} for n in range(5000)]})
    assert len(store.thread("t").load().state["big"]) == 5000
    assert store.run(talks, "hello", id="talks").result() == "HELLO"
    asyncio.run(on_a_loop(store))
    memory = store.memory("user")
    memory.put("likes", {"text": "window seats"})
    assert memory.search("window")
    assert random.getstate() == drawn  # LangGraph, below, draws from it
    history = chat(store)
    assert all(gc.is_tracked(message) for state in history for message in state.values.get("messages", ()))
    assert not calls, "".join(calls)
    from perdure.forensics import sandbox

    snapshot = store.snapshot("s")
    for _ in range(2):
        with sandbox(snapshot) as box:
            assert box.replay("talks").result == "HELLO"
            try:
                socket.create_connection(("127.0.0.1", 1))
            except perdure.UsageError:
                pass
    store.ops.verify()
ended.set()
watcher.join()

# The guard of sandboxes is an audit hook, which Python cannot remove. It is added once, and refuses nothing outside.
assert len(calls) == 1 and calls[0].startswith("sys.addaudithook: "), "".join(calls)
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
subprocess.run([sys.executable, "-c", ""], check=True)

assert not seen_disabled
after = picture()
for name, value in before.items():
    if isinstance(value, dict):
        for part, was in value.items():
            assert after[name].get(part) == was, (name, part)
    else:
        assert after[name] == value, (name, value, after[name])
until = time.monotonic() + 20
while threading.active_count() > 1:  # an idle thread of a store ends after five seconds
    assert time.monotonic() < until, threading.enumerate()
    time.sleep(0.05)
print("as it was")
'''


def test_the_process_is_as_it_was_after_perdure_was_used(tmp_path: Path) -> None:
    program = tmp_path / "host.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as it was\n"
