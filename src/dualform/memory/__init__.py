"""A recorded run on disk: segments of patterns, the learning rule's log, and what proves them sound.

`files.py` is the on-disk format and the only place that knows it; `memory.py` is what readers hold;
`layer.py` streams one layer's keys and error signals; `patterns.py` knows the coordinates of every
pattern (step, example, label, ...) and the `where` conditions over them.
"""

from dualform.memory.layer import Block, LayerMemory
from dualform.memory.memory import Buffer, Fingerprint, Memory, Parameter
from dualform.memory.patterns import Patterns

__all__ = ["Block", "Buffer", "Fingerprint", "LayerMemory", "Memory", "Parameter", "Patterns"]
