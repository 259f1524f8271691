"""Threads beside the training keep to one core each.

Torch hands large operations to a team of threads, a team for every thread that asks: those of a
background thread would compete with the training's own, and spin while they wait.
"""

from __future__ import annotations

import threading

import torch


def keep_to_one_core() -> None:
    """Let torch use one core in the calling thread, and as many as before in all others.

    The number given counts for the calling thread, and for threads that begin later: for those it
    is put back, by a thread of its own.
    """
    usual = torch.get_num_threads()
    if usual > 1:
        torch.set_num_threads(1)
        last = threading.Thread(target=torch.set_num_threads, args=(usual,))
        last.start()
        last.join()
