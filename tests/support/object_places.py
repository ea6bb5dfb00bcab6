"""Folders in object stores of this machine, with what a user has in the environment to reach them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from azurite import ACCOUNT, KEY, azurite
from fake_s3 import fake_s3

AWS = {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "hush-hush", "AWS_REGION": "us-east-1"}
GOOGLE = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}


@contextmanager
def object_place(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of an empty folder: at our own server in S3's, Google's or Azure's protocol, or in Azurite."""
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with azurite(folder, "agents") if kind == "azurite" else fake_s3("agents") as url:
        settings = {
            "s3": {**AWS, "AWS_ENDPOINT_URL": url},
            "gs": {
                "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**GOOGLE, "gcs_base_url": url}),
                "GOOGLE_BASE_URL": url,
            },
            "az": {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url},
            "azurite": {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_STORAGE_ENDPOINT": url,
            },
        }
        for name, value in settings[kind].items():
            monkeypatch.setenv(name, value)
        yield f"{'az' if kind == 'azurite' else kind}://agents/files"
