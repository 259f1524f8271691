"""How a module's input becomes patterns, and a test input queries: one file per kind of layer.

Recording and attention both need it, and they must agree to the last row, so it lives below both.
"""

from dualform.layers.linear import Layer, as_patterns, find_layers, is_recordable

__all__ = ["Layer", "as_patterns", "find_layers", "is_recordable"]
