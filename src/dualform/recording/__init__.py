"""Watching a training run without touching it, and writing down what made the weights.

`recorder.py` follows the run step by step; `capture.py` holds the hooks that see keys and error
signals; `audit.py` proves at every step that what was seen explains what the optimizer got and did;
`tags.py` names the patterns; `sink.py` takes them to disk without making training wait.
"""

from dualform.recording.recorder import Recorder, record

__all__ = ["Recorder", "record"]
