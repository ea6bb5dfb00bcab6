"""The tables of teams in several stores (`storage/domains.py`): marks and outbox are part of every snapshot."""

from __future__ import annotations

from perdure.storage.domains import Column, Domain, Table

# How far this store is with another one of the same team: see `protocol.Marks`.
PEER = Table(
    "peer",
    (
        Column("team", "text"),
        Column("peer", "text"),  # the other store's name in the team
        Column("sent", "int"),
        Column("sent_link", "bytes"),
        Column("acked", "int"),
        Column("received", "int"),
        Column("received_link", "bytes"),
    ),
    ("team", "peer"),
    few_rows=True,
    fillfactor=70,  # each batch updates the row in place
)
# Messages to members in other stores, until they are acknowledged.
OUTBOX = Table(
    "outbox",
    (
        Column("team", "text"),
        Column("peer", "text"),
        Column("seq", "int"),
        Column("body", "bytes", encrypted=("team", "peer", "seq")),  # MessagePack: see parcels.py
        Column("link", "bytes"),  # covers the body, and all before it
    ),
    ("team", "peer", "seq"),
)
# This store's part in a team of several. A restore sets it: rows of the past say only what was true then.
TEAM_STORE = Table(
    "team_store",
    (
        Column("team", "text"),
        Column("store", "text"),  # this store's name in the team
        Column("era", "int"),
        Column("cut", "int"),
        Column("restoring", "int"),  # 1: a restore has begun and not ended: nothing is sent or taken meanwhile
    ),
    ("team",),
    ties_runs="a team has members in other stores, whose messages would be lost; take all of its stores back "
    "together, by `perdure.teams.link(…).restore(…)`",
    versioned=False,
    few_rows=True,
)
# The secret that two stores share, with which their batches are signed. Neither snapshots nor restores touch it.
PEER_KEY = Table(
    "peer_key",
    (Column("team", "text"), Column("peer", "text"), Column("secret", "bytes", encrypted=("team", "peer"))),
    ("team", "peer"),
    versioned=False,
    few_rows=True,
)
# The register of a team, in the one store that was chosen for it: see register.py.
TEAM_VIEW = Table(
    "team_view",
    (Column("team", "text"), Column("revision", "int"), Column("view", "text")),
    ("team",),
    versioned=False,
    few_rows=True,
)
TABLES = (PEER, OUTBOX, TEAM_STORE, PEER_KEY, TEAM_VIEW)
OUTBOX_BODY, PEER_SECRET = OUTBOX.encrypted("body"), PEER_KEY.encrypted("secret")
DOMAIN = Domain("channels", TABLES)
