"""Watching a training run without touching it, and writing down what made the weights.

`entry.py` is the door. `recorder.py` follows the run, `steps.py` one step at a time; `capture.py`
holds the hooks that see keys and error signals; `audit.py` proves at every step that what was seen
explains what the optimizer got and did; `parameters.py` and `accounts.py` keep what is known of
each parameter; `tags.py` names the patterns; `sink.py` takes them to disk without making training
wait; `interrupts.py` keeps Ctrl-C from tearing a step apart.
"""

from dualform.recording.entry import record
from dualform.recording.recorder import Recorder

__all__ = ["Recorder", "record"]
