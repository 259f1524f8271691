"""dualform: a network trained by gradient descent is an attention over its own training.

Record any training run, then ask for any prediction which training patterns each layer looked at
(`attend`), what each of them wrote into the output (`contribute`), and what the network is without
some of them or was at an earlier step (`without`, `only`, `at`). Exactly, with a certificate.
"""

from dualform import charts
from dualform.attention import (
    Attention,
    Contribution,
    DualForm,
    Spotlight,
)
from dualform.certificate import Verification
from dualform.compact import Compaction, compact
from dualform.datasets import with_index
from dualform.errors import (
    AuditError,
    DualFormError,
    MemoryFileError,
    QueryError,
    RecordingError,
)
from dualform.estimate import Estimate, estimate
from dualform.memory import LayerMemory, Memory, Patterns
from dualform.recording import Recorder, record
from dualform.table import Table
from dualform.version import __version__ as __version__

__all__ = [
    "Attention",
    "AuditError",
    "Compaction",
    "Contribution",
    "DualForm",
    "DualFormError",
    "Estimate",
    "LayerMemory",
    "Memory",
    "MemoryFileError",
    "Patterns",
    "QueryError",
    "Recorder",
    "RecordingError",
    "Spotlight",
    "Table",
    "Verification",
    "charts",
    "compact",
    "estimate",
    "record",
    "with_index",
]
