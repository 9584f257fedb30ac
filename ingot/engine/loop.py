"""One thread that runs workloads by turns, and a mailbox for all other threads.

Any thread may call `post`, `wake`, `run`, `check`, `pulse`, `refuse_if_stopped` and `close`. Workloads are called from
the loop's thread alone, each call guarded. A workload ends the request that is at fault by itself; a fault that it lets
through is the workload's own, which gives up its requests and begins anew, and the others go on. If even that fails the
thread ends, everybody who waits is told, and the pulse says so.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from ingot.errors import IngotError, Unavailable

log = logging.getLogger("ingot.engine")
T = TypeVar("T")

Letter = Callable[[], None]
Post = Callable[[Letter], None]

BEAT_S = 1.0
"""An idle loop shows that it lives this often."""
STALLED_S = 60.0
"""No beat for this long means that the loop is stuck."""
FAILED = "The engine failed while computing this request; the server's log says why"


class Workload(Protocol):
    """What a loop runs, a bounded piece at a time. A request of it ends exactly once."""

    @property
    def name(self) -> str:
        """What the log calls it."""

    @property
    def busy(self) -> bool:
        """Whether anybody waits for it."""

    def expire(self, now: float) -> None:
        """End the requests that had to be done before `now`."""

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        """Do a piece of the work. `spent_s` is what those before it took of this turn; `shared` says whether others
        have something to do as well."""

    def rest(self) -> None:
        """Nothing runs, here or elsewhere: see that nothing was lost, and give back what running took."""

    def check(self) -> None:
        """Raises AssertionError if anything was lost or is held by nobody."""

    def abandon(self, error: IngotError) -> None:
        """End every request with `error`."""

    def begin_anew(self, error: IngotError) -> None:
        """The same after a fault: nothing that it holds is to be trusted."""

    def farewell(self, error: IngotError) -> None:
        """End with `error` whatever still waits, whatever became of the books. Raises nothing. Once the loop's thread
        has ended, any may call it."""

    def close(self) -> None:
        """Leave the device. The last call."""


@dataclass(frozen=True, slots=True)
class Pulse:
    alive: bool
    ready: bool  # and takes what comes
    detail: str
    beat_ago_s: float


class Loop:
    """Runs the workloads that `prepare` makes, in their order. `prepare` is called on the thread, once."""

    def __init__(self, name: str, prepare: Callable[[], Sequence[Workload]]) -> None:
        self._prepare = prepare
        self._workloads: Sequence[Workload] = ()
        self._mail: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self._beat = time.monotonic()
        self._closing = False
        self._over = False  # no turn comes any more
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    # For any thread

    def start(self) -> None:
        """Returns when the workloads are there, or raises what went wrong."""
        # A process that ends while this thread has mlx's streams open is aborted by them.
        atexit.register(self.close)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    def close(self) -> None:
        """Give up what runs and end the thread. A process that leaves without it does it on its way out."""
        atexit.unregister(self.close)
        self._closing = True
        self._mail.put(lambda: None)
        self._thread.join()

    def post(self, owner: Workload, letter: Letter) -> None:
        """Have a letter read between two turns. What fails in it is its owner's fault."""
        self._mail.put(partial(self._guarded, owner, letter))
        if self._over and threading.current_thread() is not self._thread:
            # Whoever came just now may have missed the farewell.
            self._thread.join()
            self._farewell(_not_running())

    def wake(self) -> None:
        """Let an idle loop look about now."""
        self._mail.put(lambda: None)

    def run(self, work: Callable[[], T]) -> T:
        """Have the thread do something and wait for it; raises what it raises."""
        self.refuse_if_stopped()
        done: Future[T] = Future()

        def settle() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # whoever waits raises it
                done.set_exception(error)

        self._mail.put(settle)
        while not wait([done], BEAT_S).done:
            self.refuse_if_stopped()
        return done.result()

    def check(self) -> None:
        """Let every workload look for what was lost, and wait for it; raises what is found."""
        self.run(self._check)

    def refuse_if_stopped(self) -> None:
        if self._closing or not self._thread.is_alive():
            raise _not_running()

    def pulse(self) -> Pulse:
        ago = time.monotonic() - self._beat
        runs = self._thread.is_alive()
        alive = runs and ago < STALLED_S
        detail = "ok" if alive else "the engine is stuck" if runs else "the engine has stopped"
        return Pulse(alive, alive and not self._closing, detail, ago)

    # The loop's thread

    def _live(self) -> None:
        try:
            self._workloads = self._prepare()
        except BaseException as error:  # handed to `start`, which raises it
            self._failure = error
            return
        finally:
            self._ready.set()
        farewell = Unavailable("The server is shutting down", retry_after=5)
        try:
            while not self._closing:
                self._turn()
            for workload in self._workloads:
                workload.abandon(farewell)
        except BaseException:
            log.critical("the engine's thread ends, and with it every answer", exc_info=True)
        finally:
            self._over = True
            self._farewell(farewell)
            for workload in self._workloads:
                with suppress(Exception):
                    workload.close()

    def _turn(self) -> None:
        self._beat = time.monotonic()
        self._take_mail()
        began = time.monotonic()
        for workload in self._workloads:
            self._guarded(workload, workload.expire, began)
        for workload in self._workloads:
            spent, shared = time.monotonic() - began, partial(self._others_busy, workload)
            self._guarded(workload, workload.advance, spent, shared)

    def _take_mail(self) -> None:
        """Run what other threads sent; with nothing else to do, wait for it."""
        busy = any(workload.busy for workload in self._workloads)
        if not busy:
            for workload in self._workloads:
                self._guarded(workload, workload.rest)
        try:
            letter = self._mail.get(block=not busy, timeout=None if busy else BEAT_S)
            while True:
                letter()
                letter = self._mail.get_nowait()
        except queue.Empty:
            pass

    def _check(self) -> None:
        for workload in self._workloads:
            workload.check()

    def _others_busy(self, workload: Workload) -> bool:
        return any(other.busy for other in self._workloads if other is not workload)

    def _guarded(self, workload: Workload, work: Callable[..., None], *given: object) -> None:
        """A model or a device may fail in ways nobody foresaw; the requests at hand fail, the server goes on."""
        try:
            work(*given)
        except Exception:
            log.exception("%s failed; the requests that were running are given up", workload.name)
            workload.begin_anew(IngotError(FAILED))

    def _farewell(self, error: IngotError) -> None:
        for workload in self._workloads:
            with suppress(Exception):
                workload.farewell(error)


def _not_running() -> Unavailable:
    return Unavailable("The engine is not running", retry_after=5)
