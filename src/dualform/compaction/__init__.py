"""Making a recorded memory smaller afterwards: fewer bits, fewer layers, or fewer error signals.

`choices.py` turns what was asked for into what becomes of every layer and parameter; `sums.py` adds
up what parameters learned whose patterns go; `rewriting.py` writes each segment anew,
`describing.py` the manifest; `converting.py` does it all in order, and `compaction.py` is what
comes back: sizes, and the loss.
"""

from dualform.compaction.compaction import Compaction
from dualform.compaction.converting import compact

__all__ = ["Compaction", "compact"]
