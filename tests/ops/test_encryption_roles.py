"""Encryption together with roles that the database holds to their tenants."""

from __future__ import annotations

import pytest
from role_kit import Roles, fill
from sealed_kit import NEW, OLD, OTHER, Raw, assert_sealed

import perdure
from perdure.encryption import StaticKeys
from perdure.encryption.keys import key_id
from perdure.errors import KeyMissing


def test_an_application_and_a_tenants_own_role_encrypt_and_rotate(roles: Roles) -> None:
    keys = StaticKeys({"acme": OLD, "globex": NEW})
    with perdure.open(roles.app, keys=keys, tenant="globex") as store:
        fill(store, "globex")
    with perdure.open(roles.tenant("acme"), keys=keys, tenant="acme") as store:
        fill(store, "acme")
        assert [info.name for info in store.threads(where={"who": "acme"}, limit=1)]
        assert store.ops.verify().ok
    assert_sealed(Raw(roles.owner))
    with perdure.open(roles.tenant("acme"), keys={"acme": OTHER}, tenant="acme") as store, pytest.raises(KeyMissing):
        store.thread("acme-thread").load()
    with perdure.open(roles.tenant("acme"), tenant="acme") as store, pytest.raises(KeyMissing):
        store.thread("acme-thread").load()
    with perdure.open(roles.tenant("acme"), keys=[OTHER, OLD], tenant="acme") as store:
        assert store.ops.rotate_keys().key == key_id(OTHER).hex()
    with perdure.open(roles.app, keys=StaticKeys({"acme": OTHER, "globex": NEW}), tenant="acme") as store:
        assert store.thread("acme-thread").load().state["secret"] == "acme"
        assert store.tenant("globex").thread("globex-thread").load().state["secret"] == "globex"
