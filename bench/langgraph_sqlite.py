"""LangGraph on a file: a long chat, many short ones, and the long one against LangGraph's own delta channel.

The peer is `langgraph-checkpoint-sqlite`, as its documentation opens it; the floor of a time is the same graph with a
saver that stores nothing, the floor of a size is all texts once, by zstd level 3. Sizes are of closed
files, their logs included. Ours is opened without any option: full durability, as the peer's.
"""

from __future__ import annotations

from pathlib import Path

from bench.langgraph_chat import DeltaState, Rival, choose_columns, floor_bytes, long_chat, short_chats
from bench.langgraph_history import readings
from bench.measure import MB, Row, Run, file_bytes

SIZE_BAR = 400.0
TIME_BAR = 5.0
OVERHEAD_BAR = 3.0
HISTORY_BAR = 15  # missed: copies are tracked, and the collector goes through millions of messages
STATE_BAR = 5.0
IN_PLACE_BAR = 1.0
SHORT_TIME_BAR = 1.3
SHORT_SIZE_BAR = 3.0
SHORT_TURNS = 3


def langgraph(run: Run) -> list[Row]:
    turns = run.count(1000, 8)
    stock, ours = Rival("sqlite", str(run.folder / "stock.db")), Rival("perdure", str(run.folder / "ours.db"))
    nothing, python = Rival("nothing"), Rival("perdure-python", str(run.folder / "python.db"))
    with_speed = choose_columns("perdure")
    answers = long_chat([stock, ours, nothing, *[python] * with_speed], turns, get_states=run.count(21, 2))
    floor = floor_bytes(answers) / MB
    stock_mb, ours_mb = _mb(stock), _mb(ours)
    peer, read, *read_python = readings([stock, ours, *[python] * with_speed], turns)
    name = f"LangGraph, {turns:,} turns"
    rows = [
        Row(f"{name}: size", ours_mb, "MB", stock_mb, floor, stock_mb / ours_mb, SIZE_BAR, "at least",
            note="peer: stock SQLite saver; floor: the texts once, zstd"),
        Row(f"{name}: time", ours.took_s, "s", stock.took_s, nothing.took_s, stock.took_s / ours.took_s, TIME_BAR,
            "at least", note="floor: a saver that stores nothing"),
        Row("  CPU, over a saver that stores nothing", ours.cpu_s, "s", stock.cpu_s, nothing.cpu_s,
            ours.cpu_s / nothing.cpu_s, OVERHEAD_BAR),
        Row(f"  history of {read.states:,} states", read.history_s, "s", peer.history_s, None,
            peer.history_s / read.history_s, HISTORY_BAR, "at least",
            note=f"a new process, at most {read.peak_bytes / MB:.0f} MB; peer's {peer.peak_bytes / MB:.0f} MB"),
        Row("  and every message in it read", read.all_s, "s", peer.all_s, None, peer.all_s / read.all_s),
        Row("  get_state at the end", ours.get_state_ms, "ms", stock.get_state_ms, nothing.get_state_ms,
            stock.get_state_ms / ours.get_state_ms, STATE_BAR, "at least"),
        Row("  get_state in a new process", read.first_s * 1000, "ms", peer.first_s * 1000, None,
            peer.first_s / read.first_s),
    ]  # fmt: skip
    for of_python in read_python:
        rows += [
            Row("  without the C accelerator: time", python.took_s, "s", stock.took_s, nothing.took_s,
                stock.took_s / python.took_s),
            Row("    CPU, over a saver that stores nothing", python.cpu_s, "s", stock.cpu_s, nothing.cpu_s,
                python.cpu_s / nothing.cpu_s),
            Row(f"    history of {read.states:,} states", of_python.history_s, "s", peer.history_s, None,
                peer.history_s / of_python.history_s),
            Row("    get_state at the end", python.get_state_ms, "ms", stock.get_state_ms, nothing.get_state_ms,
                stock.get_state_ms / python.get_state_ms),
        ]  # fmt: skip
    return [*rows, _in_place(run)]


def _in_place(run: Run) -> Row:
    """A chat whose node changes old messages in place, the first among them: nothing of it can be taken over."""
    turns = run.count(300, 4)
    stock = Rival("sqlite", str(run.folder / "stock-in-place.db"), in_place=True)
    ours = Rival("perdure", str(run.folder / "ours-in-place.db"), in_place=True)
    long_chat([stock, ours], turns, get_states=1)
    return Row(f"LangGraph, {turns:,} turns, old messages changed in place", ours.took_s, "s", stock.took_s, None,
               stock.took_s / ours.took_s, IN_PLACE_BAR, "at least")  # fmt: skip


def langgraph_short(run: Run) -> list[Row]:
    threads = run.count(1000, 10)
    stock, ours = Rival("sqlite", str(run.folder / "stock.db")), Rival("perdure", str(run.folder / "ours.db"))
    nothing = Rival("nothing")
    answers = short_chats([stock, ours, nothing], threads, SHORT_TURNS)
    floor = floor_bytes(answers) / MB
    stock_mb, ours_mb = _mb(stock), _mb(ours)
    name = f"LangGraph, {threads:,} short threads"
    return [
        Row(f"{name}: size", ours_mb, "MB", stock_mb, floor, stock_mb / ours_mb, SHORT_SIZE_BAR, "at least",
            note=f"{SHORT_TURNS} turns each; peer: stock SQLite saver"),
        Row(f"{name}: time", ours.took_s, "s", stock.took_s, nothing.took_s, stock.took_s / ours.took_s,
            SHORT_TIME_BAR, "at least", note="floor: a saver that stores nothing"),
        Row("  CPU", ours.cpu_s, "s", stock.cpu_s, nothing.cpu_s, stock.cpu_s / ours.cpu_s),
    ]  # fmt: skip


def langgraph_delta(run: Run) -> list[Row]:
    turns = run.count(1000, 8)
    stock = Rival("sqlite", str(run.folder / "stock.db"), DeltaState)
    rivals = [stock, Rival("perdure", str(run.folder / "ours.db"))]
    rivals += [Rival("perdure", str(run.folder / "ours-delta.db"), DeltaState)]
    answers = long_chat(rivals, turns, get_states=run.count(21, 2))
    floor = floor_bytes(answers) / MB
    rows: list[Row] = []
    note = "peer: stock SQLite saver with a delta channel"
    for rival, ours in zip(rivals[1:], ("ours, plain messages", "ours, delta channel too"), strict=True):
        mb, stock_mb = _mb(rival), _mb(stock)
        rows += [
            Row(f"LangGraph delta: {ours}", mb, "MB", stock_mb, floor, stock_mb / mb, note=f"{turns:,} turns; {note}"),
            Row("  time", rival.took_s, "s", stock.took_s, None, stock.took_s / rival.took_s),
            Row("  get_state at the end", rival.get_state_ms, "ms", stock.get_state_ms, None,
                stock.get_state_ms / rival.get_state_ms),
        ]  # fmt: skip
    return rows


def _mb(rival: Rival) -> float:
    return file_bytes(Path(rival.location)) / MB
