"""Looking into a memory: the network as attention over its own training.

`dual_form.py` holds the verbs, `view.py` the network at a step under masks (`masks.py`),
`queries.py` how a test input becomes queries, `spotlight.py` and `contribution.py` the two readings
(of which output, `splitting.py`, `targets.py` and `used.py` say), `verification.py` the certificate
(with `tally.py` and `rounding.py`'s bounds).

Below them the engine: `engine.py` streams a layer's patterns, `grouping.py` puts them into groups;
`weights.py` weighs a few queries exactly, `ranking.py` finds the strongest of many (with
`products.py`, `candidates.py` and `visits.py`), `group_sums.py` and `group_matrices.py` answer in
closed form (with `recurring.py` and `buckets.py`), `tables.py` keeps what was found, `compiled.py`
holds the inner loops.
"""

from dualform.attention.contribution import Contribution
from dualform.attention.dual_form import DualForm
from dualform.attention.engine import reporting
from dualform.attention.spotlight import Attention, Spotlight
from dualform.attention.verification import Check, Verification

__all__ = [
    "Attention",
    "Check",
    "Contribution",
    "DualForm",
    "Spotlight",
    "Verification",
    "reporting",
]
