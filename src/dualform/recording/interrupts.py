"""Ctrl-C waits until the step that is being written down is complete.

A signal's handler runs between any two instructions of the main thread: also inside the optimizer's
step, when half of the weights have moved, or between a step and its record. Whatever the recorder
then wrote would be wrong. So while an update is under way the signal is only kept, and handed to
the handler it was meant for right after: microseconds later, at a moment when everything is whole.

A second signal of the same kind is never kept waiting. Only handlers written in Python are looked
after (Ctrl-C has one by default); a signal that kills kills at once, as it should.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Signals of the main thread, kept waiting while something is `held`."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, FrameType | None] = {}
        self._held = False

    def install(self) -> None:
        """Look after the handlers there are. Outside of the main thread there are none to mind."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._arrived)

    def remove(self) -> None:
        """Put the handlers back, except where others have taken our place since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._arrived:
                signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._held and number not in self._waiting:
            self._waiting[number] = frame
            if not self._held:  # a thread that trains has released meanwhile, and found nothing
                self.release()
        else:
            self._handlers[number](number, frame)

    def hold(self) -> None:
        """From here on nothing may come in between."""
        self._held = True

    def release(self) -> None:
        """Deliver what has arrived meanwhile; for Ctrl-C that raises KeyboardInterrupt here."""
        self._held = False
        try:
            number, frame = self._waiting.popitem()
        except KeyError:  # nothing has, or another thread that releases took it just now
            return
        try:
            if threading.current_thread() is threading.main_thread():
                self._handlers[number](number, frame)
            else:  # training runs in another thread; signals are the main one's
                _thread.interrupt_main(signal.Signals(number))
        finally:  # one that raises does not keep the other waiting
            self.release()
