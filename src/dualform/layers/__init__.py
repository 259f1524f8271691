"""How a module's input becomes patterns, and a test input queries: one file per kind of layer.

Recording and attention both need it, and they must agree to the last row, so it lives below both.
"""

from dualform.layers.choosing import NamePatterns, chosen_names, is_chosen
from dualform.layers.finding import ROOT_NAME, Layer, find_layers, is_recordable
from dualform.layers.kinds import as_patterns, flattened, leading_shape

__all__ = [
    "ROOT_NAME",
    "Layer",
    "NamePatterns",
    "as_patterns",
    "chosen_names",
    "find_layers",
    "flattened",
    "is_chosen",
    "is_recordable",
    "leading_shape",
]
