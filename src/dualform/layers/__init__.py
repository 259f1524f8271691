"""How a module's input becomes patterns, and a test input queries: one file per kind of layer.

Recording and attention both need it, and they must agree to the last row, so it lives below both.
Outside nothing asks which kind a layer is: `kinds.of(layer.kind)` answers what it means.

    layer.py      what is known of a layer          kinds.py       the interface of kinds, by name
    linear.py, embedding.py, norm.py                one kind each
    capture.py    modules' hooks                    walk.py        weights used past modules
    uses.py       such uses in autograd's graph     choosing.py    what is kept of each layer
    finding.py    which layers a model has, and what those without a module are called
    torch_internals.py                              every private name of torch
"""

from dualform.layers import embedding as embedding
from dualform.layers import linear as linear
from dualform.layers import norm as norm
from dualform.layers.capture import Capture as Capture
from dualform.layers.capture import OnUse as OnUse
from dualform.layers.choosing import WORDS as WORDS
from dualform.layers.choosing import Keep as Keep
from dualform.layers.finding import ROOT_NAME as ROOT_NAME
from dualform.layers.finding import find_layers as find_layers
from dualform.layers.finding import possible_names as possible_names
from dualform.layers.finding import reasons_for_values as reasons_for_values
from dualform.layers.kinds import Kind as Kind
from dualform.layers.kinds import of as of
from dualform.layers.kinds import register as register
from dualform.layers.layer import Layer as Layer
from dualform.layers.torch_internals import layer_by_layer as layer_by_layer
