"""The base class of the checkpointers: what they share, whatever database is below."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, ChannelVersions, Checkpoint, CheckpointMetadata

from perdure.adapters import Codec, Encoded
from perdure.errors import UsageError
from perdure.langgraph.checkpoints import encode_checkpoint
from perdure.langgraph.configs import Address, address_of, metadata_for, note_of, tags_of
from perdure.langgraph.graph_runs import Requested
from perdure.langgraph.serde import PerdureSerde


class _AnyLine(Protocol):
    def encoded(self, id: str) -> Encoded | None: ...


L = TypeVar("L", bound=_AnyLine)
L_co = TypeVar("L_co", bound=_AnyLine, covariant=True)


class _AnyLines(Protocol[L_co]):
    @property
    def codec(self) -> Codec: ...

    def line(self, thread: str, namespace: str, tags: Mapping[str, Any] | None = None) -> L_co: ...


class NativeSaver(BaseCheckpointSaver[Any], Generic[L]):
    """A checkpointer whose values Perdure's codec encodes, unless another serializer is assigned."""

    _lines: _AnyLines[L]
    _requested: Requested
    _single_writer: bool

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> BaseCheckpointSaver[Any]:
        """Return this saver with more classes (module, name) allowed. LangGraph takes them from a graph's schema."""
        if not isinstance(self.serde, PerdureSerde):
            return super().with_allowlist(extra_allowlist)
        serde = self.serde.with_classes(extra_allowlist)
        if serde is self.serde:
            return self
        clone = copy.copy(self)
        clone.serde = serde
        return clone

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Return the next version of a channel: a counter. Versions of imported threads are text, and stay text."""
        if current is None:
            return 1
        if isinstance(current, str):
            return f"{int(current.split('.')[0]) + 1:032}"
        return int(current) + 1

    # --- what all of them share

    @property
    def _codec(self) -> Codec:
        return self._lines.codec

    def _line(self, address: Address, tags: Mapping[str, Any] | None = None) -> L:
        return self._lines.line(address.thread, address.namespace, tags)

    def _put(
        self,
        parent: Address,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> tuple[L, dict[str, Any]]:
        """Return the line of a checkpoint, and the arguments of `save`.

        Values are encoded here, on the caller's thread, so that they are stored as they are at the call.
        """
        stored = metadata_for(config, metadata)
        # Another serializer may encrypt: no note or tag may show its values.
        native = isinstance(self.serde, PerdureSerde)
        line = self._line(parent, tags_of(stored) if native else None)
        # Channels that `new_versions` does not name are unchanged, and their text is taken from the parent.
        before = line.encoded(parent.id) if parent.id is not None and new_versions else None
        run = stored.get("run_id")
        return (
            line,
            {
                "state": encode_checkpoint(
                    checkpoint, stored, parent.id, self.serde, self._codec, new_versions, before
                ),
                "id": checkpoint["id"],
                "parent": parent.id,
                "note": note_of(stored) if native else None,
                "exclusive": self._single_writer,
                "allowed": self._requested.allowed(parent.thread, parent.namespace),
                "forks": stored.get("source") == "fork",
                "run": None if run is None else str(run),
            },
        )

    def _address_written(self, config: RunnableConfig) -> Address:
        """Return the address of the checkpoint that writes belong to."""
        address = address_of(config)
        if address.id is None:
            raise UsageError("put_writes needs the checkpoint_id that the writes belong to")
        return address


def check_pruned(threads: Sequence[str], strategy: str) -> Sequence[str]:
    """Return the threads to prune. Raises UsageError."""
    if strategy not in ("keep_latest", "delete"):
        raise UsageError(f'strategy={strategy!r}: "keep_latest" or "delete"')
    return check_many(threads, "prune", "thread_ids")


def check_many(names: Sequence[str], method: str, parameter: str) -> Sequence[str]:
    """Return a list of names as text. Raises UsageError for a single one: its characters would be taken for names."""
    if isinstance(names, str | bytes):
        raise UsageError(f"{method}({names!r}): {parameter} are a list: [{names!r}]")
    return [str(one) for one in names]
