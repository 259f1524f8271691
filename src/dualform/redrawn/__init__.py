"""The record, drawn again: the rooms that take the place of `layers` to `recording` when they pass."""
