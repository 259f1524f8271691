"""How a module's input becomes patterns, and a test input queries: one file per kind of layer.

Recording and attention both need it, and they must agree to the last row, so it lives below both.
"""

from dualform.layers.choosing import NamePatterns, chosen_names, is_chosen
from dualform.layers.linear import ROOT_NAME, Layer, as_patterns, find_layers, is_recordable

__all__ = [
    "ROOT_NAME",
    "Layer",
    "NamePatterns",
    "as_patterns",
    "chosen_names",
    "find_layers",
    "is_chosen",
    "is_recordable",
]
