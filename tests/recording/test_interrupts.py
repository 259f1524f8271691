"""Signals wait while an update is under way, and for nothing else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dualform.recording.interrupts import SIGNALS, Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watching = Interrupts()
    watching.install()
    try:
        yield watching
    finally:
        watching.remove()
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_a_signal_waits_while_something_is_held(interrupts: Interrupts) -> None:
    interrupts.hold()
    os.kill(os.getpid(), signal.SIGINT)
    whole = True
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    assert whole
    interrupts.hold()
    interrupts.release()


def test_a_second_signal_does_not_wait(interrupts: Interrupts) -> None:
    interrupts.hold()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_of_two_that_wait_one_that_raises_does_not_keep_the_other(interrupts: Interrupts) -> None:
    interrupts.remove()
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    interrupts.install()
    interrupts.hold()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.release()
    assert seen == [signal.SIGTERM]


def test_a_signal_is_delivered_at_once_when_nothing_is_held(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handlers_are_put_back_and_those_of_others_left_alone(interrupts: Interrupts) -> None:
    interrupts.remove()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    interrupts.install()

    def other(number: int, frame: Any) -> None: ...

    signal.signal(signal.SIGINT, other)
    interrupts.remove()
    assert signal.getsignal(signal.SIGINT) is other


def test_a_signal_that_kills_is_left_alone(interrupts: Interrupts) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_other_threads_do_not_mind_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def work() -> None:
        watching = Interrupts()
        watching.install()
        watching.hold()
        seen.append(signal.getsignal(signal.SIGINT))
        watching.release()
        watching.remove()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
