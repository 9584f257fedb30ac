"""One thread that runs workloads by turns, and a mailbox for all other threads.

Any thread may call `post`, `wake`, `run`, `add`, `check`, `pulse`, `refuse_if_stopped` and `close`. Workloads are
called from the loop's thread alone, each call guarded; they may come and go while it runs. A workload ends the request
that is at fault by itself; a fault that it lets through is the workload's own, which gives up its requests and begins
anew, and the others go on. If even that fails the thread ends, everybody who waits is told, and the pulse says so.
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

from ingot.errors import IngotError, Stopping, Unavailable

log = logging.getLogger("ingot.engine")
T = TypeVar("T")

Letter = Callable[[], None]
Post = Callable[[Letter], None]

BEAT_S = 1.0
"""An idle loop shows that it lives this often."""
REST_S = 1.0
"""Who has nothing to do rests this often while others are busy."""
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
        """Nothing of it runs, though others may have something to do: see that nothing was lost, give back what running
        took, and save some of what is to be saved. Takes little time."""

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
        """Save what is to be saved. The last call."""


@dataclass(frozen=True, slots=True)
class Pulse:
    alive: bool
    ready: bool  # and takes what comes
    detail: str
    beat_ago_s: float


def nothing() -> None:
    """What is done where there is nothing to do."""


class Loop:
    """Runs the workloads that `prepare` makes, in their order, and those that are added. `prepare` is called on the
    thread, first; `leave` is, too, last."""

    def __init__(
        self, name: str, prepare: Callable[[], Sequence[Workload]] = tuple, leave: Callable[[], None] = nothing
    ) -> None:
        self._prepare, self._leave = prepare, leave
        self._workloads: tuple[Workload, ...] = ()
        self._mail: queue.SimpleQueue[Letter] = queue.SimpleQueue()
        self._beat = self._rested = time.monotonic()
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

    def add(self, make: Callable[[], Sequence[Workload]]) -> tuple[Workload, ...]:
        """Have the thread make further workloads, wait for it, and run them from then on; raises what `make` raises.
        Others get no turn meanwhile but when `make` calls `breathe`."""

        def added() -> tuple[Workload, ...]:
            made = tuple(make())
            self._workloads += made
            return made

        return self.run(added)

    def remove(self, workloads: Sequence[Workload], error: IngotError) -> None:
        """Give up workloads, whose requests end with `error`. For the loop's own thread, so that whatever they hold can
        be let go of there."""
        self._workloads = tuple(each for each in self._workloads if each not in workloads)
        for workload in workloads:
            self._part(workload, error)

    def breathe(self) -> None:
        """Give the workloads a turn. For work of the loop's own thread that takes long, and nobody else. Raises
        Unavailable where the loop is to end."""
        if self._closing:
            raise _not_running()
        self._turn()

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
            self._workloads = tuple(self._prepare())
        except BaseException as error:  # handed to `start`, which raises it
            self._failure = error
            self._leave()
            return
        finally:
            self._ready.set()
        farewell = Stopping("The server is shutting down", retry_after=5)
        try:
            while not self._closing:
                self._turn(waits=True)
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
            self._leave()

    def _part(self, workload: Workload, error: IngotError) -> None:
        for last in (workload.abandon, workload.farewell):
            with suppress(Exception):
                last(error)
        try:
            workload.close()
        except Exception:
            log.exception("%s could not be closed as it should be", workload.name)

    def _turn(self, *, waits: bool = False) -> None:
        self._beat = time.monotonic()
        self._take_mail(waits=waits)
        began = time.monotonic()
        for workload in self._workloads:
            self._guarded(workload, workload.expire, began)
        for workload in self._workloads:
            spent, shared = time.monotonic() - began, partial(self._others_busy, workload)
            self._guarded(workload, workload.advance, spent, shared)

    def _take_mail(self, *, waits: bool) -> None:
        """Run what other threads sent; with nothing else to do, wait for it if that is allowed."""
        busy = any(workload.busy for workload in self._workloads) or not waits
        if not busy or (waits and time.monotonic() - self._rested > REST_S):
            self._rest()
        try:
            letter = self._mail.get(block=not busy, timeout=None if busy else BEAT_S)
            while True:
                letter()
                letter = self._mail.get_nowait()
        except queue.Empty:
            pass

    def _rest(self) -> None:
        self._rested = time.monotonic()
        for workload in self._workloads:
            if not workload.busy:
                self._guarded(workload, workload.rest)

    def _check(self) -> None:
        for workload in self._workloads:
            workload.check()

    def _others_busy(self, workload: Workload) -> bool:
        return any(other.busy for other in self._workloads if other is not workload)

    def _guarded(self, workload: Workload, work: Callable[..., None], *given: object) -> None:
        """A model or a device may fail in ways nobody foresaw; the requests at hand fail, the server goes on."""
        try:
            work(*given)
        except Unavailable as error:
            log.error("%s cannot go on: %s", workload.name, error)
            workload.begin_anew(error)
        except Exception:
            log.exception("%s failed; the requests that were running are given up", workload.name)
            workload.begin_anew(IngotError(FAILED))

    def _farewell(self, error: IngotError) -> None:
        for workload in self._workloads:
            with suppress(Exception):
                workload.farewell(error)


def _not_running() -> Unavailable:
    return Unavailable("The engine is not running", retry_after=5)
