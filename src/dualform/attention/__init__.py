"""Looking into a memory: the network as attention over its own training.

`dual_form.py` holds the verbs, `view.py` the network at a step under masks (`masks.py`),
`queries.py` how a test input becomes queries, `spotlight.py` and `contribution.py` the two
readings, `verification.py` the certificate (with `tally.py` and the bounds of `rounding.py`),
`engine.py` the streamed sums they all rest on.
"""

from dualform.attention.contribution import Contribution
from dualform.attention.dual_form import DualForm
from dualform.attention.spotlight import Attention, Spotlight
from dualform.attention.verification import Check, Verification

__all__ = ["Attention", "Check", "Contribution", "DualForm", "Spotlight", "Verification"]
