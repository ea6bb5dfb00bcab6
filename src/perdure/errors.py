"""Every error Perdure raises, as one tree.

A message says what happened, to what, and what to do now. Driver errors (SQLite's, PostgreSQL's) are
translated where they arise, in `perdure.storage`, and kept as `__cause__`.

    PerdureError
    ├── UsageError             a call that cannot be right: a wrong URL, an option that does not exist
    │   ├── Pinned             what was to be deleted holds pinned checkpoints
    │   └── ExtraMissing       a feature whose packages are not installed; an ImportError too
    ├── NotFound               no such thread or checkpoint
    │   ├── ThreadDeleted      it existed, was deleted, and this handle is late
    │   └── HistoryGone        how it was at an earlier instant is not on record any more
    ├── Archived               the thread or run is in an archive; says where, and how to bring it back
    ├── Conflict               another writer moved the head that you expected
    ├── ValueProblem
    │   ├── Unstorable         a value that cannot be saved; names its path; nothing was written
    │   ├── UnknownType        a stored value of a class this process does not know or trust
    │   └── Undecodable        stored text that is not ours, is cut short, or breaks a limit
    ├── BatchRefused           what another store of a team sent was not taken; nothing changed
    ├── NoProgress             compaction did not make a scratchpad small enough; nothing was added
    ├── Damaged                a record failed its checks and no valid one could stand in for it
    ├── RunError               a durable run
    │   ├── NotInRun           a call that needs a run, made where there is none
    │   ├── NonDeterministic   the code took another way than its journal says
    │   ├── RunMismatch        the id belongs to a run of another function or version, or with other arguments
    │   ├── RunFailed          the run ended with an error of its own code, which is the cause
    │   ├── RunCancelled       it was cancelled
    │   ├── RunUndone          its effects that have an undo were undone, at the request of its code or of an operator
    │   ├── RunStuck           it waits for a correction; nothing was undone
    │   ├── InDoubt            it is unknown whether an effect happened
    │   ├── NotApproved        a person said no to an effect; it did not run
    │   ├── StepFailed         stands for a recorded error whose class is not here, as a cause or in a text
    │   ├── LeaseLost          another process has taken the run over
    │   ├── JournalDamaged     a run's journal does not add up
    │   ├── AnswerRefused      an answer that the question does not allow
    │   └── MailboxFull        as many messages wait for a member of a team as its box may hold
    └── StoreError             the database below
        ├── OpenError          it cannot be opened as a Perdure store
        ├── KeyMissing         it is encrypted, and the key is not there, is wrong or was replaced
        ├── NotEncrypted       data that is not encrypted, met where everything must be
        ├── StoreClosed        the store was closed, or closed itself after a failure
        ├── ForkedProcess      this store was opened by the parent process
        ├── ReadOnlyStore      the disk or the file does not allow writing
        ├── DiskFull           no space left; nothing of this operation was written
        ├── Stale              it does not hold what a read asks for: it is a replica, or behind a session token
        ├── Busy               another writer held the store longer than the deadline
        ├── Unavailable        the server cannot be reached or went away; nothing was written
        └── OutcomeUnknown     the connection broke during COMMIT and the outcome could not be looked up
"""

from __future__ import annotations


class PerdureError(Exception):
    """The root of every error of Perdure."""


class UsageError(PerdureError, ValueError):
    """A call that cannot be right, whatever the store holds."""


class Pinned(UsageError):
    """A thread with pinned checkpoints is deleted only if that is said: `force=True`, or `unpin` first."""


class ExtraMissing(UsageError, ImportError):
    """The packages of an extra, which a feature needs, are not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the extra `{extra}`, which is not installed: "
            f"run pip install '.[{extra}]' in your clone of Perdure"
        )
        self.extra = extra


class NotFound(PerdureError, LookupError):
    """No such thread or checkpoint."""


class ThreadDeleted(NotFound):
    """The thread was deleted after this handle was made; late writes are refused."""


class HistoryGone(NotFound):
    """How something was at an earlier instant (`store.at`) is not on record any more. Says since when it is."""


class Archived(PerdureError):
    """The thread or run was archived. `place` is the store file, or the URL of the object, that holds it."""

    def __init__(self, message: str, *, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class Conflict(PerdureError):
    """The head is not the one that was expected. Both are named, as checkpoint ids (None: no checkpoint)."""

    def __init__(self, message: str, *, expected: str | None = None, actual: str | None = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual


class ValueProblem(PerdureError):
    """The root of errors about values."""


class Unstorable(ValueProblem, TypeError):
    """A value cannot be saved. `path` names it, for example `state["plan"][3].callback`."""

    def __init__(self, message: str, *, path: str = "state") -> None:
        super().__init__(message)
        self.path = path


class UnknownType(ValueProblem):
    """A stored value belongs to a class that is neither registered nor trusted here."""

    def __init__(self, message: str, *, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


class Undecodable(ValueProblem):
    """Stored text is not Perdure's, is cut short, or breaks a limit."""


class NoProgress(PerdureError):
    """Compaction did not make enough room. Nothing was added; compacting again would not help."""


class BatchRefused(PerdureError):
    """A batch of another store of a team was not taken, and nothing changed.

    It is forged, too large, or of another team, or one of the two stores was put back to an old backup.
    """


class Damaged(PerdureError):
    """A record failed its checks. `checkpoints` lists the ids that could not be read."""

    def __init__(self, message: str, *, checkpoints: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.checkpoints = checkpoints


class ValueMissing(NotFound, Damaged):
    """A large value that the store refers to is not there. A run that reads it is stuck, until the object is back."""


class StoreError(PerdureError):
    """The root of errors about the database below."""


class OpenError(StoreError):
    """The target cannot be opened as a Perdure store."""


class KeyMissing(StoreError):
    """Data is encrypted with a key that is not there, is another one, or was replaced. `key` is the key's id."""

    def __init__(self, message: str, *, tenant: str = "", key: str = "") -> None:
        super().__init__(message)
        self.tenant, self.key = tenant, key


class Stale(StoreError):
    """The store at hand is a replica, or does not hold yet what a session token names. Read from another store."""


class NotEncrypted(StoreError):
    """Encryption is on, and what was read is not encrypted: nothing of it was used."""


class StoreClosed(StoreError):
    """The store was closed, or closed itself after a failure that must not be retried."""


class ForkedProcess(StoreError):
    """The store was opened by the parent process. Open stores after forking (PostgreSQL's may be opened again)."""


class ReadOnlyStore(StoreError):
    """The disk or the file does not allow writing."""


class DiskFull(StoreError):
    """No space left on the device; nothing of this operation was written."""


class Busy(StoreError):
    """Another writer held the store longer than the deadline; nothing was written."""


class Unavailable(StoreError):
    """The database server cannot be reached or went away; nothing was written."""


class OutcomeUnknown(StoreError):
    """The connection broke during COMMIT: it may or may not have been written."""


class RunError(PerdureError):
    """The root of errors about durable runs."""


class NotInRun(RunError, RuntimeError):
    """A call that needs a run was made where there is none: outside of one, or in a thread of the user's own."""


class NonDeterministic(RunError):
    """On replay the code took another way than the journal says. `expected` is what is recorded, `actual` what came."""

    def __init__(self, message: str, *, path: str = "", expected: str = "", actual: str = "") -> None:
        super().__init__(message)
        self.path, self.expected, self.actual = path, expected, actual


class RunMismatch(RunError, ValueError):
    """The id belongs to a run of another function, or with other arguments."""


class RunFailed(RunError):
    """The run ended with an error of its own code: `__cause__`, and `error` as text."""

    def __init__(self, message: str, *, error: str = "") -> None:
        super().__init__(message)
        self.error = error


class RunCancelled(RunError):
    """The run was cancelled. What its effects with an `undo` did was undone, except by `cancel(undo=False)`."""


class RunUndone(RunError):
    """The run was undone: its effects with an `undo`, newest first. The text names those without one: they stand."""


class RunStuck(RunError):
    """The run waits for a correction (changed code, an unstorable value, a lost store). Nothing was undone."""


class InDoubt(RunError):
    """It is unknown whether an effect happened. `key` is its idempotency key."""

    def __init__(self, message: str, *, run: str = "", step: str = "", key: str = "") -> None:
        super().__init__(message)
        self.run, self.step, self.key = run, step, key


class NotApproved(RunError):
    """A person said no to an effect; it did not run."""


class StepFailed(RunError):
    """Stands for a recorded error whose class this process does not have, as a cause or as a text for a model.

    `type_name` names the class. Where code might catch the error, the run is stuck instead.
    """

    def __init__(self, message: str, *, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name


class LeaseLost(RunError):
    """Another process has taken the run over; this one may not write any more."""


class JournalDamaged(RunError):
    """A run's journal does not add up to what its row says: rows are missing, changed or added."""


class AnswerRefused(RunError, ValueError):
    """An answer that the question does not allow; says why."""


class MailboxFull(RunError):
    """As many messages wait for a member of a team as its `capacity` allows. Nothing was sent."""
