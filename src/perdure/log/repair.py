"""Repair of the log: what a record's hash proves stays, everything else becomes a tombstone and goes to quarantine.

Tree by tree, each in one transaction: a kill leaves a tree as it was or repaired, and a second repair changes nothing.
A keyframe's full text is rebuilt from the difference that it kept; a keyframe whose difference is damaged stands by its
full text. A record that its hash refutes loses its content; its row stays as a tombstone, so that the hashes of what
follows hold, and what was built on it gets its full text. What points at records is `repair_pointers.py`'s.

Must never happen here: content stays that no hash proves, or a row is removed that is not in quarantine.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from perdure.errors import Damaged, NotEncrypted, Undecodable
from perdure.log.gc import rearrange, sweep
from perdure.log.gc_plan import Node, Plan, nodes_of
from perdure.log.ids import ID_MAX
from perdure.log.packs import PACK, salts_in
from perdure.log.quarantine import set_aside
from perdure.log.reading import NOT_SWEPT, read_state
from perdure.log.records import ERASED, NUMBER_MAX, R_COLUMNS, RECORD_CELLS, RECORD_SEALS, Record, record_of
from perdure.log.repair_pointers import (
    Notes,
    drop_orphans,
    find_lost_threads,
    loads,
    place_packs,
    repair_heads,
    repair_labels,
    repair_thread_rows,
    repair_writes,
)
from perdure.log.thread_table import threads_in_tree
from perdure.log.verify import Findings, check_tree
from perdure.storage.columns import DIFF, FULL_TEXT, SALT
from perdure.storage.domains import owned_tables
from perdure.storage.program import Batch, Flow, Program, Progress, Rows, Sql, check, mend, read, write
from perdure.values.compress import compress_full, decompress_full

_PAGE = 200
_ROUNDS_MAX = 8
_LEAST = -(1 << 63)  # before every number, also a damaged one
_ROWS = Sql(
    f"""SELECT {R_COLUMNS} FROM record r WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after AND {NOT_SWEPT}
    ORDER BY r.id LIMIT :limit""",
    opens=RECORD_CELLS,
    tolerant="all",
)
_SET_ROW = Sql(
    f"""UPDATE record SET {", ".join(f"{name} = :{name}" for name in Record._fields)}
    WHERE tenant = :tenant AND tree = :tree AND id = :id""",
    seals=RECORD_SEALS,
)
_BODIES = Sql(
    f"""SELECT r.id, b.id, b.salt, b.diff, b.full_text FROM record r
    JOIN body b ON b.tenant = r.tenant AND b.id = r.body
    WHERE r.tenant = :tenant AND r.tree = :tree AND r.id > :after AND {NOT_SWEPT} ORDER BY r.id LIMIT :limit""",
    opens={2: SALT, 3: DIFF, 4: FULL_TEXT},
    tolerant="all",
)
_SET_BODY = Sql(
    "UPDATE body SET salt = :salt, diff = :diff, full_text = :full_text WHERE tenant = :tenant AND id = :body",
    seals={"salt": SALT, "diff": DIFF, "full_text": FULL_TEXT},
)
_FULL = Sql("SELECT full_text FROM body WHERE tenant = :tenant AND id = :body", opens={0: FULL_TEXT}, tolerant="all")
_SET_FULL = Sql(
    "UPDATE body SET full_text = :full_text WHERE tenant = :tenant AND id = :body", seals={"full_text": FULL_TEXT}
)
_DROP_DIFF = Sql("UPDATE body SET diff = NULL WHERE tenant = :tenant AND id = :body")
_TO_KEYFRAME = Sql(
    """UPDATE record SET keyframe = 1, key = id, cost = 0, base = CASE WHEN :linked = 1 THEN base END
    WHERE tenant = :tenant AND tree = :tree AND id = :id"""
)
# The history continues behind it, as behind an erased one.
_TO_TOMBSTONE = Sql(
    f"""UPDATE record SET body = NULL, base = NULL, keyframe = {ERASED}, key = id, note = NULL, metadata = NULL,
        size = 0, cost = 0, parent = CASE WHEN parent >= 0 AND parent < id THEN parent END
    WHERE tenant = :tenant AND tree = :tree AND id = :id"""
)
_SHARING = Sql("SELECT id FROM record WHERE tenant = :tenant AND body = :body LIMIT 2")
_HAS_BODY = Sql("SELECT 1 FROM body WHERE tenant = :tenant AND id = :body")
_MEMBERS = Sql(
    "SELECT tree, count(*) FROM record WHERE tenant = :tenant AND body = :body GROUP BY tree ORDER BY 2 DESC, 1"
)
_PLACE = Sql("SELECT first, last FROM pack WHERE tenant = :tenant AND pack = :pack")
_TREES = Sql(
    "SELECT tree FROM thread WHERE tenant = :tenant AND tree > :after GROUP BY tree ORDER BY tree LIMIT :limit"
)
_SEALED = Sql("SELECT 1 FROM tenant_key WHERE tenant = :tenant LIMIT 1")
_UNKNOWN = "NOT EXISTS (SELECT 1 FROM tenant t WHERE t.tenant = o.tenant)"
_ADD_TENANT = Sql("INSERT INTO tenant (tenant, name) VALUES (:number, :name) ON CONFLICT DO NOTHING")


@dataclass
class RepairReport:
    """What a repair of a log did: thread's name, record (None: the thread itself, or the store), what."""

    repaired: Notes = field(default_factory=list)
    lost: Notes = field(default_factory=list)

    def add(self, other: RepairReport) -> None:
        self.repaired += other.repaired
        self.lost += other.lost


def repair_unknown_tenants() -> Program[RepairReport]:
    """Rows whose tenant has no row: a tenant that has threads gets one again, everything else goes to quarantine."""
    report = RepairReport()
    tables = owned_tables()
    answers = yield Batch(*(Sql(f"SELECT DISTINCT o.tenant FROM {table} o WHERE {_UNKNOWN}")() for table in tables))
    found = dict(zip(tables, ({tenant for (tenant,) in rows if type(tenant) is int} for rows in answers), strict=True))
    whole = {tenant for tenant in found["thread"] if tenant in found["record"]}
    for tenant in sorted(whole):
        name = f"recovered-{tenant}"
        yield Batch(_ADD_TENANT(number=tenant, name=name))
        report.repaired.append(("(store)", None, f"the name of tenant {tenant} was lost: it is called {name} now"))
    for table, owned in tables.items():
        for tenant in sorted(found[table] - whole):
            find = Sql(f"SELECT {', '.join(owned.key)} FROM {table} WHERE tenant = :tenant LIMIT :limit")
            while keys := (yield Batch(find(tenant=tenant, limit=_PAGE)))[0]:
                for key in keys:
                    yield from set_aside(tenant, table, key, "it belongs to no tenant", drop=True)
                    report.lost.append(("(store)", None, f"a row of {table} that belongs to no tenant"))
    return report


def repair_log(tenant: int, *, rows_lost: bool, progress: Progress | None = None) -> Flow[RepairReport]:
    """Repair all threads of a tenant. `rows_lost`: the database itself was damaged, so that rows may be missing."""
    report = RepairReport()
    report.repaired += yield from repair_thread_rows(tenant)
    found, lost = yield from write(partial(find_lost_threads, tenant), solo=True)
    report.add(RepairReport(found, lost))
    tree, done = _LEAST, 0
    while trees := (yield from read(partial(_page, tenant, tree))):
        for at, tree in enumerate(trees):
            report.add((yield from _repair_if_damaged(tenant, tree, rows_lost or bool(found))))
            done += 1
            if progress is not None:
                progress(done, done + len(trees) - at - 1)
    yield from sweep(tenant)
    report.repaired += yield from write(partial(place_packs, tenant))
    report.repaired += yield from drop_orphans(tenant)
    return report


def _page(tenant: int, after: int) -> Program[list[int]]:
    [rows] = yield Batch(_TREES(tenant=tenant, after=after, limit=_PAGE), last=True)
    return [tree for (tree,) in rows]


def _repair_if_damaged(tenant: int, tree: int, rows_lost: bool) -> Flow[RepairReport]:
    try:
        findings = yield from check(partial(check_tree, tenant, tree))
        sound = not findings.problems and not rows_lost
    except (Damaged, NotEncrypted):
        sound = False
    return RepairReport() if sound else (yield from mend(partial(repair_tree, tenant, tree, rows_lost)))


def repair_tree(tenant: int, tree: int, rows_lost: bool) -> Program[RepairReport]:
    """Repair one tree."""
    threads = yield from threads_in_tree(tenant, tree, lock=True)
    names = {thread.thread: thread.name for thread in threads}
    report = RepairReport()
    # Labels that cannot be read stand in the way of checking the rest.
    report.repaired += yield from repair_labels(tenant, tree, threads, relabel=False)
    yield from _repair_rows(tenant, tree, names, report)
    if (yield Batch(_SEALED(tenant=tenant)))[0]:
        yield from _empty_unopened(tenant, tree)
    for _ in range(_ROUNDS_MAX):
        findings = yield from check_tree(tenant, tree)
        wrong = sorted({record for _, record, _ in findings.problems if record is not None})
        if not wrong:
            break
        yield from _prove_or_tombstone(tenant, tree, wrong, findings, report)
        report.repaired += yield from repair_heads(tenant, tree, threads)
        threads = yield from threads_in_tree(tenant, tree)
        report.repaired += yield from repair_writes(tenant, tree, threads)
        report.repaired += yield from repair_labels(tenant, tree, threads, relabel=rows_lost)
    else:
        raise Damaged(
            f"the tree of thread {next(iter(names.values()), tree)!r} could not be repaired; please report it"
        )
    if rows_lost:
        report.repaired += yield from repair_writes(tenant, tree, threads)
        report.repaired += yield from repair_labels(tenant, tree, threads, relabel=True)
    lost = {record for _, record, _ in report.lost if record is not None}
    report.repaired = list(dict.fromkeys(one for one in report.repaired if one[1] not in lost or "head" in one[2]))
    return report


# --- rows


def _repair_rows(
    tenant: int, tree: int, names: dict[int, str], report: RepairReport
) -> Generator[Batch, list[Rows], None]:
    """Make rows readable whose columns are not of their types. Whether that was all, their hashes tell afterwards."""
    after: Any = _LEAST
    while True:
        [rows] = yield Batch(_ROWS(tenant=tenant, tree=tree, after=after, limit=_PAGE))
        for row in rows:
            after = row[1]
            try:
                record_of(row)
                continue
            except Damaged:
                readable = _readable(row)
            name = names.get(row[2], "(store)") if type(row[2]) is int else "(store)"
            yield from set_aside(tenant, "record", row[:2], "its row is damaged", drop=readable is None)
            if readable is not None:
                yield Batch(_SET_ROW(tenant=tenant, **readable._asdict()))
                report.repaired.append((name, readable.id, "its row was made readable again"))
            else:
                report.lost.append((name, row[1] if type(row[1]) is int else None, "its row is damaged"))
        if len(rows) < _PAGE:
            return


def _readable(row: tuple[Any, ...]) -> Record | None:
    """A damaged row with a plain value in every column that is none. None: it cannot be told which record it was."""
    found = Record._make(row)
    if type(found.id) is not int or not 0 <= found.id <= ID_MAX or type(found.hash) is not bytes:
        return None
    plain: dict[str, Any] = {
        "thread": found.tree,
        "key": found.id,
        "kind": "",
        "at": 0,
        "step": 0,
        "size": 0,
        "cost": 0,
    }
    plain |= {"keyframe": 0, "parent": None, "base": None, "note": None, "metadata": None, "body": None}
    for name, value in plain.items():
        given = getattr(found, name)
        texts = name in ("kind", "note", "metadata")
        fits = type(given) is str if texts else type(given) is int and (name == "body" or 0 <= given <= NUMBER_MAX)
        if not fits:
            found = found._replace(**{name: value})
    try:
        return record_of(found)
    except Damaged:
        return None


def _empty_unopened(tenant: int, tree: int) -> Generator[Batch, list[Rows], None]:
    """Empty the cells of an encrypted store that do not open, or were never encrypted: a reader then finds them damaged
    and is not refused."""
    after = -1
    while True:
        [rows] = yield Batch(_BODIES(tenant=tenant, tree=tree, after=after, limit=_PAGE))
        for number, body, *cells in rows:
            after = number
            if all(cell is None or type(cell) is bytes for cell in cells):
                continue
            yield from set_aside(tenant, "body", (body,), "it does not open with the key", drop=False)
            salt, diff, full = (cell if type(cell) is bytes else None for cell in cells)
            yield Batch(_SET_BODY(tenant=tenant, body=body, salt=salt or b"", diff=diff, full_text=full))
        if len(rows) < _PAGE:
            return


# --- states


def _prove_or_tombstone(
    tenant: int, tree: int, wrong: list[int], findings: Findings, report: RepairReport
) -> Generator[Batch, list[Rows], None]:
    about = {record: (name, what) for name, record, what in reversed(findings.problems) if record is not None}
    nodes = yield from nodes_of(tenant, tree)
    lost: list[int] = []
    for number in wrong:
        if number not in nodes or nodes[number].body is None:
            continue
        repaired = yield from _prove(tenant, tree, number)
        if repaired is None:
            lost.append(number)
        elif repaired:
            report.repaired.append((about[number][0], number, repaired))
    strays: list[int] = []
    for number in lost:
        strays += [number] if (yield from _has_body_of_another(tenant, tree, nodes[number])) else []
    for number in strays or lost:  # without the strays, others may be read again
        name, what = about[number]
        yield from _keep(tenant, tree, nodes[number], what)
        report.lost.append((name, number, what))
        parent = nodes[number].parent
        if parent is not None and 0 <= parent <= ID_MAX and parent not in nodes:
            report.lost.append((name, parent, "its row is gone"))
    if not strays:
        yield from _entomb(tenant, tree, nodes, lost)
    for number in strays or lost:
        yield Batch(_TO_TOMBSTONE(tenant=tenant, tree=tree, id=number))


def _prove(tenant: int, tree: int, number: int) -> Generator[Batch, list[Rows], str | None]:
    """Rebuild what is damaged of a record that its hash proves. What was done ("": nothing); None: it is not proved."""
    if not (yield from loads(tenant, tree, number)):
        return None
    loaded = yield from read_state(tenant, tree, number)
    if loaded is None or not loaded.record.keyframe or (loaded.record.body or 0) < 0:
        return ""
    this = {"tenant": tenant, "body": loaded.record.body}
    [rows] = yield Batch(_FULL(**this))
    if _is_text(rows[0][0] if rows else None, loaded.data):
        yield Batch(_DROP_DIFF(**this), _TO_KEYFRAME(tenant=tenant, tree=tree, id=number, linked=0))
        return "its difference is damaged: it stands by its full text"
    yield Batch(
        _SET_FULL(**this, full_text=compress_full(loaded.data)),
        _TO_KEYFRAME(tenant=tenant, tree=tree, id=number, linked=1),
    )
    return "its full text was rebuilt from the keyframe before it"


def _is_text(full: object, text: bytes) -> bool:
    try:
        return type(full) is bytes and decompress_full(full, len(text)) == text
    except Undecodable:
        return False


def _has_body_of_another(tenant: int, tree: int, node: Node) -> Generator[Batch, list[Rows], bool]:
    """Whether a record points at a body that is another's, or at none: then nothing must be removed there."""
    body = node.body
    assert body is not None
    if body >= 0:
        sharing, rows = yield Batch(_SHARING(tenant=tenant, body=body), _HAS_BODY(tenant=tenant, body=body))
        return len(sharing) > 1 or not rows
    members, packs, places = yield Batch(
        _MEMBERS(tenant=tenant, body=body), PACK(tenant=tenant, pack=-body), _PLACE(tenant=tenant, pack=-body)
    )
    if members[0][0] != tree:
        return True
    try:
        if not packs or type(packs[0][1]) is not bytes:
            return False
        first, last = places[0]
        return len(salts_in(packs[0][1])) < sum(count for _, count in members) and not first <= node.id <= last
    except Undecodable:
        return False


def _keep(tenant: int, tree: int, node: Node, reason: str) -> Generator[Batch, list[Rows], None]:
    yield from set_aside(tenant, "record", (tree, node.id), reason, drop=False)
    if node.body is not None:
        table, key = ("pack", -node.body) if node.body < 0 else ("body", node.body)
        yield from set_aside(tenant, table, (key,), f"of a checkpoint that is lost: {reason}", drop=False)


def _entomb(tenant: int, tree: int, nodes: dict[int, Node], lost: list[int]) -> Generator[Batch, list[Rows], None]:
    """Remove the bodies of lost records. What was built on one gets its full text, or stands by the one it has."""
    gone = set(lost)
    plan = Plan(entomb=lost)
    for node in nodes.values():
        if node.body is None or node.id in gone or node.base is None:
            continue
        if node.base in gone or node.base not in nodes or nodes[node.base].body is None:
            (plan.unlink if node.keyframe else plan.rebase).append(node.id)
    if lost or plan.rebase or plan.unlink:
        yield from rearrange(tenant, tree, nodes, plan)
