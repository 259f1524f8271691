"""Do patterns, log and weights agree? One answer, to the bit where bits can be expected.

`bounds.py` is the one theory of rounding, `marks.py` the numbers that say where training was;
recorder, resuming and `verify` share both. `gradients.py` is what patterns sum to, `replay.py` lets
torch's own optimizer take the steps again; by these `judging.py` finds a verdict for a parameter,
`checks.py` for all and the model, and `report.py` says what was found.
"""

from dualform.certificate.checks import step_of as step_of
from dualform.certificate.checks import verify as verify
from dualform.certificate.replay import at as at
from dualform.certificate.report import ANOTHER as ANOTHER
from dualform.certificate.report import Check as Check
from dualform.certificate.report import Verification as Verification
