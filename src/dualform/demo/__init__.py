"""The first thing to run: a small network recorded, certified and looked into, in one minute.

`story.py` does it, with public names only, as a user would; `chapters.py` is what it found, and
`screen.py` draws it. `network` is the architecture, so that a memory kept with `--path RUN` can be
asked more: `dualform verify RUN --model dualform.demo:network`.
"""

from dualform.demo.chapters import Chapter
from dualform.demo.screen import draw, farewell, opening
from dualform.demo.story import network, tell

__all__ = ["Chapter", "draw", "farewell", "network", "opening", "tell"]
