"""An optimizer's step may be given a closure, which runs the backward pass from within the step.

What the optimizer is about to use is then there only after the closure has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def read_before_moving(read: Callable[[], None], args: Any, kwargs: Any) -> Any:
    """For an optimizer's pre-hook: `read` now, or, given a closure, after its last backward pass.

    Returns the arguments to go on with, None for those given.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        read()
        return None

    def closure_then_read() -> Any:
        loss = closure()
        read()
        return loss

    if len(args) > 1:
        return (args[0], closure_then_read, *args[2:]), kwargs
    return args, kwargs | {"closure": closure_then_read}
