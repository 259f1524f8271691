"""How often this process was forked off another since dualform was loaded there.

A fork has none of the threads that worked for its parent. Asking the system for the number of the
process at every turn would tell, too, but amid a training step that takes microseconds each time.
"""

from __future__ import annotations

import os

count = 0
"""Another number than before: this is a fork."""


def _forked() -> None:
    global count
    count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
