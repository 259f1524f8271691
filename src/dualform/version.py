"""The version, where every floor of the house can read it."""

__version__ = "0.1.0"
