"""Do patterns, log, kept states and weights agree? One answer, one theory of rounding.

`bounds.py` says how far rounding may put a number off, `replay.py` takes the updates again (with
the gradients of `gradients.py`), `checks.py` puts both together, `report.py` is what is handed out.
"""

from dualform.certificate.checks import verify as verify
from dualform.certificate.report import Check as Check
from dualform.certificate.report import Verdict as Verdict
from dualform.certificate.report import Verification as Verification
