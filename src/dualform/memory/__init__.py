"""A recorded run on disk: rows of patterns, their columns, the learning rule's log, what was kept.

The format: `files.py` says what lies where and what a commit is, `content.py` names a segment's
tensors, `tensor_files.py` writes and reads them, each block checked when it is first touched;
`fields.py` and `description.py` read what the manifest and the lines say.

Reading: `segments.py` is what a directory holds, `memory.py` what readers hold, with `layer.py` (a
layer's rows), `patterns.py` (where they came from, and `where` conditions) and `kept.py` (states).

Writing: `writing.py` commits and cuts back, `narrowing.py` puts rows into 16 bits, `liveness.py`
knows who is writing.
"""

from dualform.memory.content import COMPUTED_IN as COMPUTED_IN
from dualform.memory.content import SegmentContent as SegmentContent
from dualform.memory.description import Buffer as Buffer
from dualform.memory.description import Event as Event
from dualform.memory.description import Parameter as Parameter
from dualform.memory.description import Phase as Phase
from dualform.memory.kept import Kept as Kept
from dualform.memory.layer import Block as Block
from dualform.memory.layer import DistinctKeys as DistinctKeys
from dualform.memory.layer import LayerMemory as LayerMemory
from dualform.memory.memory import Memory as Memory
from dualform.memory.memory import ParameterLog as ParameterLog
from dualform.memory.patterns import Patterns as Patterns
from dualform.memory.patterns import Uses as Uses
from dualform.memory.writing import MemoryWriter as MemoryWriter
from dualform.memory.writing import environment as environment
