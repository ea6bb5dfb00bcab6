"""Where the snapshots of an autosave go: written at once, by a thread, or by a task of the event loop.

In the background at most one snapshot is being written and one waits: a newer one takes its place, because it holds
everything that the older one does. They are written in the order in which they were taken. The same thread or task is
the clock of policies that go by time: it wakes up when a save is due though nobody has touched the state.

The thread never looks at the live state, which its user may be changing: it writes texts that were made at a call. The
task may: while it runs, no other code of its event loop does.
"""

from __future__ import annotations

import asyncio
import threading

from perdure.storage.program import adrive, drive
from perdure.threads.autosave_session import Session, Snapshot


class DirectWriter:
    """The change that makes a save due waits until it is durable."""

    in_background = False

    def __init__(self, session: Session) -> None:
        self._session = session

    def put(self, snapshot: Snapshot) -> None:
        drive(self._session.ctx.driver, self._session.write(snapshot))

    def look(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class ThreadWriter:
    """A thread writes; whoever changes the state waits only while the text is made."""

    in_background = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self._news = threading.Condition()
        self._waiting: Snapshot | None = None
        self._is_busy = self._is_closing = False
        # A daemon: a database that hangs must not keep a process alive that was told to end. Leaving the `with` waits.
        self._thread = threading.Thread(target=self._run, name="perdure-autosave", daemon=True)
        self._thread.start()

    def put(self, snapshot: Snapshot) -> None:
        with self._news:
            self._waiting = snapshot
            self._news.notify_all()

    def look(self) -> None:
        with self._news:
            self._news.notify_all()

    def flush(self) -> None:
        """Wait until everything is written. Raises what went wrong."""
        with self._news:
            while self._waiting is not None or self._is_busy:
                self._news.wait()
        self._session.raise_error()

    def close(self) -> None:
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                self._is_busy = False
                self._news.notify_all()
                # The session's lock is never taken here: whoever has it may want this one.
                while self._waiting is None and not self._is_closing:
                    timeout_s = self._session.timer_s(live=False)
                    if timeout_s == 0:
                        break
                    self._news.wait(timeout_s)
                snapshot, self._waiting = self._waiting, None
                if snapshot is None and self._is_closing:
                    return
                self._is_busy = True
            if snapshot is None:
                self._session.ring(live=False)
                continue
            try:
                drive(self._session.ctx.driver, self._session.write(snapshot))
            except Exception as error:
                self._session.failed(snapshot, error)


class TaskWriter:
    """A task of the running event loop writes. A change cannot be awaited, so this is how it is in async code."""

    in_background = False  # nothing is put by: its clock looks at the state itself

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._waiting: Snapshot | None = None
        self._is_closing = False
        self._task = self._loop.create_task(self._run())

    def put(self, snapshot: Snapshot) -> None:
        self._waiting = snapshot
        self.look()

    def look(self) -> None:
        self._loop.call_soon_threadsafe(self._wake)  # a change may come from a thread of the user's

    def _wake(self) -> None:
        self._idle.clear()
        self._news.set()

    async def aflush(self) -> None:
        """Wait until everything is written. Raises what went wrong."""
        self._wake()
        waiting = self._loop.create_task(self._idle.wait())
        try:
            # If the task has died, nobody will ever be idle.
            await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done():
            self._task.result()
        self._session.raise_error()

    async def aclose(self) -> None:
        """Write what still waits, and end."""
        self._is_closing = True
        self._wake()
        try:
            await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._task.cancel()  # whoever leaves is in a hurry
            raise

    async def _run(self) -> None:
        session = self._session
        while True:
            while self._waiting is not None:
                snapshot, self._waiting = self._waiting, None
                try:
                    await adrive(session.ctx.driver, session.write(snapshot))
                except Exception as error:
                    session.failed(snapshot, error)
            if self._is_closing:
                return
            if not self._news.is_set():
                self._idle.set()
                try:
                    async with asyncio.timeout(session.timer_s(live=True)):
                        await self._news.wait()
                except TimeoutError:
                    session.ring(live=True)
            self._news.clear()
