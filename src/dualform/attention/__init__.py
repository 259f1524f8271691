"""Looking into a memory: the network as attention over its own training.

`dual_form.py` holds the verbs, `view.py` the network at a step under masks (`masks.py`),
`queries.py` how a test input becomes queries, `spotlight.py` and `contribution.py` the two readings
(of which output, `splitting.py`, `targets.py` and `used.py` say). `reach.py` says of which
parameters the shares of patterns are known, `written.py` adds them up, `entrywise.py` follows rules
such as Adam.

Below them the engine: `engine.py` streams a layer's patterns, `grouping.py` puts them into groups;
`weights.py` weighs a few queries exactly, `ranking.py` finds the strongest of many (with
`products.py`, `candidates.py` and `visits.py`), `group_sums.py` answers in closed form (with
`recurring.py` and `buckets.py`), `tables.py` keeps what was found, `compiled.py` holds the inner
loops.
"""

from dualform.attention.contribution import Contribution
from dualform.attention.dual_form import DualForm
from dualform.attention.engine import reporting
from dualform.attention.spotlight import Attention, Spotlight

__all__ = [
    "Attention",
    "Contribution",
    "DualForm",
    "Spotlight",
    "reporting",
]
