"""Container of a Cosmos DB container: four requests, with Azure's errors translated. Bodies of any size.

Only single items are written: creating one is atomic, and no promise depends on more. Queries are constants with
parameters. The client and its credential are the caller's: nothing here sees a key.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from azure.core.exceptions import AzureError, ServiceRequestError
from azure.cosmos import ContainerProxy, CosmosClient, PartitionKey
from azure.cosmos.exceptions import (
    CosmosHttpResponseError,
    CosmosResourceExistsError,
    CosmosResourceNotFoundError,
)

from perdure.errors import Busy, Damaged, OpenError, OutcomeUnknown, PerdureError, Unavailable, UsageError

PART_CHARACTERS_MAX = 1_500_000  # an item may have 2 MB
# Time to live is on, but nothing expires by itself. Bodies are not indexed: indexing would cost more than storing.
_TTL_ON = -1
_INDEXING = {
    "indexingMode": "consistent",
    "includedPaths": [{"path": "/*"}],
    "excludedPaths": [{"path": "/body/?"}, {"path": '/"_etag"/?'}],
}
_PARTS = "SELECT c.number, c.body FROM c WHERE c.pk = @pk AND c.part_of = @token"

Item = dict[str, Any]


class Container:
    """The items of one container."""

    def __init__(self, client: CosmosClient, database: str, container: str) -> None:
        if not isinstance(client, CosmosClient):
            raise UsageError(
                f"the client is an azure.cosmos.CosmosClient, not {type(client).__name__}: async methods use it too"
            )
        self._client, self._database, self._name = client, database, container
        self._container: ContainerProxy = client.get_database_client(database).get_container_client(container)

    def __repr__(self) -> str:
        return f"{self._database}/{self._name}"

    def setup(self) -> None:
        """Create the database and the container where they do not exist."""
        with self._translated(writes=False):
            database = self._client.create_database_if_not_exists(self._database)
            database.create_container_if_not_exists(
                self._name, PartitionKey(path="/pk"), default_ttl=_TTL_ON, indexing_policy=_INDEXING
            )

    def create(self, item: Item, data: bytes = b"", *, replaces: bool = False) -> bool:
        """Create an item with a body. Return False if there is one of its id, and `replaces` is not set.

        A large body is stored in parts before the item itself. So an item that can be read has all of it.
        """
        text = b64encode(data).decode()
        if len(text) <= PART_CHARACTERS_MAX:
            item["body"] = text
        else:
            item["parts"] = token = os.urandom(16).hex()  # no other writer's parts have these ids
            starts = range(0, len(text), PART_CHARACTERS_MAX)
            for number, start in enumerate(starts):
                part = {"id": f"{token}.{number}", "pk": item["pk"], "part_of": token, "number": number}
                part |= {name: item[name] for name in ("ttl",) if name in item}
                with self._translated(writes=True):
                    self._container.create_item(
                        {**part, "body": text[start : start + PART_CHARACTERS_MAX]}, no_response=True
                    )
        try:
            with self._translated(writes=True):
                store = self._container.upsert_item if replaces else self._container.create_item
                store(item, no_response=True)
        except CosmosResourceExistsError:
            return False
        return True

    def data(self, item: Item) -> bytes:
        """Return the body of an item. Raises Damaged."""
        text = item.get("body")
        if text is None:
            parts = self.query(_PARTS, item["pk"], token=item.get("parts"))
            text = "".join(part["body"] for part in sorted(parts, key=lambda part: int(part["number"])))
        try:
            return b64decode(text, validate=True)
        except (ValueError, TypeError) as error:
            raise Damaged(f"item {item.get('id')!r} in {self} is damaged: its body is not Base64") from error

    def query(self, text: str, partition: str | None, **parameters: Any) -> list[Item]:
        """Return the items of a query. Without a partition, all partitions are searched."""
        named = parameters if partition is None else {"pk": partition, **parameters}
        listed = [{"name": f"@{name}", "value": value} for name, value in named.items()]
        where: dict[str, Any] = {"partition_key": partition} if partition is not None else {}
        with self._translated(writes=False):
            return list(
                self._container.query_items(
                    text, parameters=listed, enable_cross_partition_query=partition is None, **where
                )
            )

    def delete(self, id: str, partition: str) -> None:
        """Delete an item, if it is there."""
        try:
            with self._translated(writes=True):
                self._container.delete_item(id, partition)
        except CosmosResourceNotFoundError:
            pass

    @contextmanager
    def _translated(self, *, writes: bool) -> Iterator[None]:
        """Translate Azure's errors, except those that say that an item exists or does not."""
        try:
            yield
        except CosmosResourceExistsError:
            raise
        except CosmosResourceNotFoundError as error:
            if error.sub_status == 1003 or not writes:  # the container, not the item
                raise OpenError(f"there is no container {self} in this account: call setup()") from error
            raise
        except CosmosHttpResponseError as error:
            raise self._refused(error, writes) from error
        except ServiceRequestError as error:
            raise Unavailable(f"Cosmos DB cannot be reached for {self}: nothing was written; try again") from error
        except AzureError as error:
            raise self._unknown("the connection broke", writes) from error

    def _refused(self, error: CosmosHttpResponseError, writes: bool) -> PerdureError:
        status = error.status_code
        if status in (401, 403):
            return OpenError(f"Cosmos DB refused the credential for {self} ({status}): check its key or its roles")
        if status == 429:
            return Busy(f"Cosmos DB refused a request to {self} ({status}): its throughput is used up; try again later")
        if status is not None and 400 <= status < 500 and status not in (408, 449):
            return UsageError(f"Cosmos DB refused a request to {self} ({status}); the cause has its words")
        return self._unknown(f"Cosmos DB answered {status}", writes)

    def _unknown(self, problem: str, writes: bool) -> PerdureError:
        if writes:
            return OutcomeUnknown(
                f"{problem} while writing to {self}: it may or may not be written; load, then continue"
            )
        return Unavailable(f"{problem} while reading {self}: try again")
