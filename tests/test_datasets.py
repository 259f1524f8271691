"""`with_index`: every item comes with its place, whoever shuffles it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dualform


def test_tuples_and_lists_get_the_index_in_front() -> None:
    assert dualform.with_index([("a", 3), ("b", 7)])[1] == (1, "b", 7)
    assert dualform.with_index([["a", 3]])[0] == (0, "a", 3)


def test_dicts_get_an_entry_called_example() -> None:
    indexed = dualform.with_index([{"image": 1.5}, {"image": 2.5}])
    assert indexed[1] == {"example": 1, "image": 2.5}


def test_a_dict_that_has_an_example_id_already_is_refused_not_overwritten() -> None:
    with pytest.raises(dualform.DualFormError, match="already has an entry 'example'"):
        dualform.with_index([{"example": 99}])[0]


@pytest.mark.parametrize("item", [5, "text", None])
def test_anything_else_becomes_a_pair(item: Any) -> None:
    assert dualform.with_index([item])[0] == (0, item)


def test_a_tensor_is_not_taken_apart() -> None:
    index, item = dualform.with_index(torch.arange(6).reshape(3, 2))[2]
    assert index == 2
    assert item.tolist() == [4, 5]


def test_counting_from_the_end_gives_the_place_from_the_start() -> None:
    assert dualform.with_index([["a"], ["b"]])[-1] == (1, "b")
    with pytest.raises(IndexError):
        dualform.with_index([["a"]])[1]


def test_the_length_is_the_datasets_own() -> None:
    assert len(dualform.with_index(range(5))) == 5


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), iter([1, 2]), {1, 2}])
def test_what_has_no_index_is_refused_with_advice(dataset: Any) -> None:
    with pytest.raises(dualform.DualFormError, match="yield an id with each item itself"):
        dualform.with_index(dataset)


@pytest.mark.parametrize("workers", [0, 2])
def test_under_a_shuffling_loader_ids_and_items_stay_together(workers: int) -> None:
    values = torch.arange(20) * 10
    loader = DataLoader(
        dualform.with_index(TensorDataset(values)),
        batch_size=6,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(3),
    )
    batches = list(loader)
    seen = torch.cat([index for index, _ in batches])
    assert sorted(seen.tolist()) == list(range(20))
    assert all(torch.equal(index * 10, value) for index, value in batches)


class InBatches:
    """A dataset that fetches a batch at once, as some remote ones do."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int]:
        raise AssertionError("asked one by one")

    def __getitems__(self, indices: list[int]) -> list[tuple[int]]:
        return [(100 + index,) for index in indices]


def test_a_dataset_that_fetches_whole_batches_still_does() -> None:
    (index, value), *_ = DataLoader(dualform.with_index(InBatches()), batch_size=4)
    assert index.tolist() == [0, 1, 2, 3]
    assert value.tolist() == [100, 101, 102, 103]
