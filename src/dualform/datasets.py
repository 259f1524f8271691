"""Example ids for any dataset: the one column nearly every question asks for.

A data loader shuffles, so a training loop usually no longer knows which example it is looking at.
Wrapping the dataset puts each item's index in front of it, ready for `recorder.tag(example=…)`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from dualform.errors import DualFormError

EXAMPLE = "example"
"""The name of the index in items that are dicts, and of the column it is meant for."""


def with_index(dataset: Any) -> WithIndex:
    """The same dataset with each item's index in front.

    Example:
        >>> import dualform
        >>> indexed = dualform.with_index([("a", 3), ("b", 7)])
        >>> indexed[1], len(indexed)
        ((1, 'b', 7), 2)

    Tuples and lists become `(index, *item)`, dicts `{"example": index, **item}`, anything else
    `(index, item)`. Works under any sampler and with any number of loader workers.
    """
    if isinstance(dataset, IterableDataset) or not _is_map_style(dataset):
        raise DualFormError(
            f"with_index was given a {type(dataset).__name__}, which cannot be asked for its n-th "
            "item (no __getitem__ and __len__), so its items have no index. Expected a map-style "
            "dataset; let an iterable one yield an id with each item itself, and give that to "
            "recorder.tag(example=...)"
        )
    return WithIndex(dataset)


class WithIndex(Dataset[Any]):
    """A map-style dataset whose items know their place; loader workers can unpickle it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        place = self._place(index)
        return _put_in_front(place, self.dataset[place])

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """A whole batch at once, the way the wrapped dataset fetches one."""
        places = [self._place(index) for index in indices]
        fetch = getattr(self.dataset, "__getitems__", None)
        items = fetch(places) if callable(fetch) else [self.dataset[place] for place in places]
        return [_put_in_front(place, item) for place, item in zip(places, items, strict=True)]

    def __repr__(self) -> str:
        return f"with_index({self.dataset!r})"

    def _place(self, index: Any) -> int:
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"item {place} of a dataset of {len(self)} was asked for")
        return place % len(self)


def _is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _put_in_front(index: int, item: Any) -> Any:
    if isinstance(item, Mapping):
        if EXAMPLE in item:
            raise DualFormError(
                f"item {index} of the dataset already has an entry {EXAMPLE!r}, which with_index "
                "would hide. Tag that one, without with_index, or rename it"
            )
        return {EXAMPLE: index, **item}
    if isinstance(item, (tuple, list)):
        return (index, *item)
    return (index, item)
