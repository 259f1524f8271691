"""Recording a training run: what is trained leaves its patterns, and training never notices.

 training thread                                   worker                        writer
 forward   capture: key held, tag remembered
 backward  node hook ── append ─▶ parcel
             1 MB or end of pass ── parcel ──────▶ copy rows; Σ δ (x·v)
           end of pass: wait ◀─────────────────────
 step()    before: g·v against the sums; settings
           torch moves the weights
           after:  rows settled; line, marks, small values
                 every 64: copy of the state ───▶ fingerprint
           step over: line appended      ← from here on it counts
           full: set handed over ─────────────────────────────────────────▶ columns, 16 bits,
                                                                            recurring inputs, crc,
                                                                            write, fsync, line

Read first: `entry.py` (what users ask for), `recorder.py` (begin and end), `passes.py` (what a
backward pass brings), `updates.py` (what an optimizer's step does). They use `watched.py` (every
parameter and layer), `gradients.py` (does it add up, by which factor), `states.py` (what moves each
parameter; marks), `kept.py` (states and digests beside patterns), `tags.py`, `sink.py` (to disk)
and `resuming.py`.

What holds everywhere in this room:

1. Rows have one owner at a time: training until the pass ends, the worker until it is waited for,
   the writer once they are handed over. They are pending until their layer's optimizer moves.
2. The worker is waited for in four places: a pass's begin and end, an update, a commit.
3. A step counts once its line is appended; nothing is written into a line after that.
4. What patterns do not explain is kept as states and events; no remainder is computed here.
5. There is one way through a pass (`passes.py`) and one way through an update (`updates.py`).
6. Nothing that can raise stands between the end of the loop and closing the sink.
"""

from dualform.recording.entry import record
from dualform.recording.recorder import Recorder

__all__ = ["Recorder", "record"]
