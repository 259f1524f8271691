"""A recorded run on disk: segments of patterns, the learning rule's log, their proof.

`files.py` is the on-disk format: what lies where, and the manifest. `tensor_files.py` writes and
reads the safetensors files, `writing.py` and `segments.py` know what is in one, `description.py`
reads what the manifest says of the model, `rewinding.py` cuts a memory back to an earlier step,
`copying.py` writes one that is made from another, `narrowing.py` puts rows into 16 bits,
`liveness.py` knows who is writing. `replay.py` replays an adaptive optimizer, `following.py` with
what rounding explains. `memory.py` is what
readers hold; `layer.py` streams one layer's keys and error signals; `patterns.py` knows the
coordinates of every pattern (step, example, label, ...) and the `where` conditions over them.
"""

from dualform.memory.description import Buffer, Conversion, Parameter, Phase
from dualform.memory.fingerprint import Fingerprint
from dualform.memory.layer import Block, LayerMemory
from dualform.memory.memory import Memory
from dualform.memory.patterns import Patterns

__all__ = [
    "Block",
    "Buffer",
    "Conversion",
    "Fingerprint",
    "LayerMemory",
    "Memory",
    "Parameter",
    "Patterns",
    "Phase",
]
