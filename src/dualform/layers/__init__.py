"""How a module's input becomes patterns, and a test input queries: one file per kind of layer.

Recording and attention both need it, and they must agree to the last row, so it lives below both.
Outside this room nothing asks which kind a layer is: `kinds.of(layer.kind)` answers what it means.

    layer.py      what is known of a layer          kinds.py       the interface of kinds, by name
    linear.py, embedding.py, norm.py                one kind each
    capture.py    modules' hooks                    walk.py        weights used past modules
    finding.py, choosing.py   which layers, what is kept
    uses.py, naming.py        how weights are used past modules, what such a layer is called
    torch_internals.py        every private name of torch
"""

from dualform.layers import embedding, linear, norm
from dualform.layers.capture import Capture, OnUse
from dualform.layers.choosing import WORDS, Keep
from dualform.layers.fast_path import layer_by_layer
from dualform.layers.finding import ROOT_NAME, find_layers, reasons_for_values
from dualform.layers.kinds import Kind, of, register
from dualform.layers.layer import Layer
from dualform.layers.naming import possible_names

__all__ = [
    "ROOT_NAME",
    "WORDS",
    "Capture",
    "Keep",
    "Kind",
    "Layer",
    "OnUse",
    "embedding",
    "find_layers",
    "layer_by_layer",
    "linear",
    "norm",
    "of",
    "possible_names",
    "reasons_for_values",
    "register",
]
