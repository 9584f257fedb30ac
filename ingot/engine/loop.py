"""The engine thread: one thread that runs workloads in turns, and a mailbox for all other threads.

Any thread may call `post`, `wake`, `run`, `add`, `check`, `pulse`, `refuse_if_stopped` and `close`. Workloads are
called on the loop's thread alone, and may be added and removed while it runs. A workload ends a request that is at
fault by itself. An error that it lets through ends all its requests, and it starts anew, while the other workloads go
on. If even that fails, the thread ends, every waiting request fails, and `pulse` reports it.

A lost device ends all workloads: nothing is computed, saved or freed any more, since each of these would fail or crash.
Every waiting request fails, and `on_device_lost` is called, which ends the process.

The loop knows nothing of what it runs. `engine_loop` makes the one whose thread may use mlx.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from ingot.errors import DeviceLost, IngotError, Stopping, Unavailable
from ingot.kernels.device import is_device_lost, leave_device

log = logging.getLogger("ingot.engine")
T = TypeVar("T")

LoopMessage = Callable[[], None]
PostMessage = Callable[[LoopMessage], None]

BEAT_S = 1.0
"""How often an idle loop beats."""
REST_S = 1.0
"""How often an idle workload rests while others are busy."""
STALLED_S = 60.0
"""No beat for this long means that the loop is stuck."""
DEVICE_IS_LOST = "the device was lost; the server is being started again"
REQUEST_FAILED = "The engine failed while computing this request; the server's log says why"


class Workload(Protocol):
    """What a loop runs, in bounded pieces. Each of its requests ends exactly once."""

    @property
    def name(self) -> str:
        """Its name in the log."""

    @property
    def busy(self) -> bool:
        """Whether it has requests."""

    def expire(self, now: float) -> None:
        """End the requests whose deadline is before `now`."""

    def advance(self, spent_s: float, shared: Callable[[], bool]) -> None:
        """Do a piece of the work. `spent_s` is what the workloads before it took of this turn; `shared` tells whether
        others are busy too."""

    def rest(self) -> None:
        """It is idle, though others may be busy: check its state, free memory, and save a little of what is unsaved.
        Takes little time."""

    def check(self) -> None:
        """Raises AssertionError if its state is inconsistent."""

    def abandon(self, error: IngotError) -> None:
        """End every request with `error`."""

    def reset_after_fault(self, error: IngotError) -> None:
        """The same after a fault: start with new state, as none of the old is to be trusted."""

    def farewell(self, error: IngotError) -> None:
        """End every request with `error`, however inconsistent the state is. Raises nothing. Once the loop's thread has
        ended, any thread may call it."""

    def close(self) -> None:
        """Save what is unsaved. The last call."""


@dataclass(frozen=True, slots=True)
class LoopHealth:
    alive: bool
    ready: bool  # and accepts requests
    detail: str
    beat_ago_s: float


def do_nothing() -> None: ...


class Loop:
    """Runs the workloads that `prepare` makes, in their order, and those added later. `prepare` is called first on the
    thread, `leave` last. `is_lost` tells whether an error means that the device is lost."""

    def __init__(
        self,
        name: str,
        prepare: Callable[[], Sequence[Workload]] = tuple,
        leave: Callable[[], None] = do_nothing,
        is_lost: Callable[[BaseException], bool] = lambda error: isinstance(error, DeviceLost),
    ) -> None:
        self._prepare, self._leave, self._is_lost = prepare, leave, is_lost
        self._workloads: tuple[Workload, ...] = ()
        self._in_turn: list[Workload] = []
        self._mailbox: queue.SimpleQueue[LoopMessage] = queue.SimpleQueue()
        self._beat = self._rested = time.monotonic()
        self._closing = False
        self._over = False  # there are no further turns
        self._failure: BaseException | None = None
        self._lost = False  # the device
        self._on_device_lost: Callable[[], None] = do_nothing
        self._ready = threading.Event()
        self._device_released = threading.Event()  # after a lost device, the thread may end
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)

    # For any thread

    def start(self) -> None:
        """Returns when the workloads are made, or raises what went wrong."""
        # A process that ends while this thread has mlx's streams open is aborted by them.
        atexit.register(self.close)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            if not self._lost:
                self.close()
            raise self._failure

    def close(self) -> None:
        """Abandon all requests and end the thread. Registered with atexit, too."""
        atexit.unregister(self.close)
        self._closing = True
        self._device_released.set()
        self._mailbox.put(lambda: None)
        self._thread.join()

    def on_device_lost(self, call: Callable[[], None]) -> None:
        """Have `call` called once the device is lost and all requests have failed; at once where that has happened. The
        process then has to end without `close` or anything else that would reach the device."""
        self._on_device_lost = call
        if self._lost:
            call()

    def post(self, owner: Workload, message: LoopMessage) -> None:
        """Run a message between two turns. If it fails, that is its owner's fault."""
        self._mailbox.put(partial(self._guarded, owner, message))
        if self._over and threading.current_thread() is not self._thread:
            # A request that came just now may have missed the farewell.
            if not self._lost:
                self._thread.join()
            self._farewell(self._refusal())

    def wake(self) -> None:
        """Make an idle loop take a turn now."""
        self._mailbox.put(lambda: None)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread and wait for it; raises what it raises."""
        self.refuse_if_stopped()
        done: Future[T] = Future()

        def settle() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # whoever waits raises it
                if self._is_lost(error):
                    done.set_exception(DeviceLost())
                    raise DeviceLost from error
                done.set_exception(error)

        self._mailbox.put(settle)
        while not wait([done], BEAT_S).done:
            self.refuse_if_stopped()
        return done.result()

    def add(self, make: Callable[[], Sequence[Workload]], *, first: bool = False) -> tuple[Workload, ...]:
        """Make further workloads on the thread, wait for them, and run them from then on; raises what `make` raises.
        Meanwhile others get turns only when `make` calls `run_other_workloads`. With `first` the new workloads have
        their turn before the others."""

        def added() -> tuple[Workload, ...]:
            made = tuple(make())
            self._workloads = (*made, *self._workloads) if first else (*self._workloads, *made)
            return made

        return self.run(added)

    def remove(self, workloads: Sequence[Workload], error: IngotError) -> None:
        """Close workloads, whose requests end with `error`. For the loop's own thread, so that the caller can free
        their memory there."""
        self._workloads = tuple(each for each in self._workloads if each not in workloads)
        for workload in workloads:
            self._close_workload(workload, error)

    def run_other_workloads(self) -> None:
        """Give the workloads a turn. Only for long work on the loop's own thread. Raises Unavailable where the loop is
        closing."""
        if self._closing:
            raise self._refusal()
        self._turn()

    def run_meanwhile(self) -> None:
        """Give workloads a turn while one that has its own waits for something other than the device. What came in
        for them since is not looked at: it might be about the one that waits."""
        began = self._beat = time.monotonic()
        for workload in self._workloads:
            if workload not in self._in_turn:
                spent, shared = time.monotonic() - began, partial(self._others_busy, workload)
                self._guarded(workload, workload.advance, spent, shared)

    def check(self) -> None:
        """Let every workload check its state, and wait for it; raises what is found."""
        self.run(self._check)

    def refuse_if_stopped(self) -> None:
        if self._lost or self._closing or not self._thread.is_alive():
            raise self._refusal()

    def pulse(self) -> LoopHealth:
        ago = time.monotonic() - self._beat
        if self._lost:
            return LoopHealth(False, False, DEVICE_IS_LOST, ago)
        runs = self._thread.is_alive()
        alive = runs and ago < STALLED_S
        detail = "ok" if alive else "the engine is stuck" if runs else "the engine has stopped"
        return LoopHealth(alive, alive and not self._closing, detail, ago)

    # The loop's thread

    def _run_thread(self) -> None:
        try:
            self._workloads = tuple(self._prepare())
        except BaseException as error:  # handed to `start`, which raises it
            if self._is_lost(error):
                self._failure = DeviceLost()
                self._lose(error)
            else:
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
        except BaseException as error:
            if self._is_lost(error):
                self._lose(error)
                return
            log.critical("the engine's thread ends, and with it every answer", exc_info=True)
        self._over = True
        self._farewell(farewell)
        for workload in self._workloads:
            with suppress(Exception):
                workload.close()
        self._leave()

    def _lose(self, error: BaseException) -> None:
        """The device is lost. This thread waits until the process ends, as ending the thread would reach for the
        device."""
        log.critical("the device is lost, and with it every answer", exc_info=error)
        self._lost = self._over = True
        self._farewell(DeviceLost())
        self._ready.set()
        self._on_device_lost()
        self._device_released.wait()
        with suppress(Exception):
            self._leave()

    def _close_workload(self, workload: Workload, error: IngotError) -> None:
        for last in (workload.abandon, workload.farewell):
            with suppress(Exception):
                last(error)
        try:
            workload.close()
        except Exception:
            log.exception("%s could not be closed cleanly", workload.name)

    def _turn(self, *, waits: bool = False) -> None:
        self._beat = time.monotonic()
        self._read_mailbox(waits=waits)
        began = time.monotonic()
        for workload in self._workloads:
            self._guarded(workload, workload.expire, began)
        for workload in self._workloads:
            spent, shared = time.monotonic() - began, partial(self._others_busy, workload)
            self._guarded(workload, workload.advance, spent, shared)

    def _read_mailbox(self, *, waits: bool) -> None:
        """Run other threads' messages; with nothing else to do, wait for one if `waits`."""
        busy = any(workload.busy for workload in self._workloads) or not waits
        if not busy or (waits and time.monotonic() - self._rested > REST_S):
            self._rest()
        try:
            message = self._mailbox.get(block=not busy, timeout=None if busy else BEAT_S)
            while True:
                message()
                message = self._mailbox.get_nowait()
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

    def _guarded(self, workload: Workload, work: Callable[..., None], *arguments: object) -> None:
        """Whatever fails ends the workload's requests, and the server goes on, unless the device is lost."""
        self._in_turn.append(workload)
        try:
            work(*arguments)
            return
        except Exception as error:
            if self._is_lost(error):
                raise DeviceLost from error
            if isinstance(error, Unavailable):
                log.error("%s cannot go on: %s", workload.name, error)
                failure: IngotError = error
            else:
                log.exception("%s failed; its running requests fail with it", workload.name)
                failure = IngotError(REQUEST_FAILED)
            _clear_frames(error)
        finally:
            self._in_turn.remove(workload)
        workload.reset_after_fault(failure)  # here, where nothing refers to the failed call

    def _farewell(self, error: IngotError) -> None:
        for workload in self._workloads:
            with suppress(Exception):
                workload.farewell(error)

    def _refusal(self) -> IngotError:
        return DeviceLost() if self._lost else Unavailable("The engine is not running", retry_after=5)


def _clear_frames(error: BaseException) -> None:
    """Free the local variables of what failed: their arrays would live for as long as a log handler has the error."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def engine_loop(prepare: Callable[[], Sequence[Workload]] = tuple) -> Loop:
    """A loop whose thread may use mlx; to be started."""
    return Loop("ingot-engine", prepare, leave_device, is_device_lost)
