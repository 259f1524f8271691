"""Gradients that are lent: read where the training loop has them, instead of being copied.

Copying a gradient would cost the training thread more than all else it does for the recording. But
it is the loop's own tensor, which may be written over at any time: `zero_grad(set_to_none=False)`,
`p.grad.zero_()`, another backward pass. So every gradient lent is looked at again on the training
thread, after whoever reads it is done: torch counts a tensor's in-place changes. And as long as it
is lent, nothing else can lie in its memory; a gradient that does is the old one, used again.

All of this is asked at every step of every parameter, so it is asked of all of them at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from dualform.recording.parameters import Watched
from dualform.recording.ring import StepRecord
from dualform.recording.sums import Accumulated

version_in = attrgetter("_version")
_nature = attrgetter("is_cpu", "requires_grad", "layout", "dtype")
_lends = attrgetter("lends")


@dataclass(eq=False, slots=True)
class Account:
    """One parameter as the accountant follows it."""

    watched: Watched
    sum: Accumulated | None
    """None where what was learned can be read off the weights: only these are predicted then."""
    lends: bool = False
    """Whether gradients are lent rather than copied."""
    first: tuple[Tensor, int, Tensor] | None = None
    """The gradient from which the loop's habit will be learned, its version, and a copy."""
    habit_known: bool = False
    bytes: int = 0
    """What a gradient takes."""


class Lot(NamedTuple):
    """Gradients of one step: whose they are, how often each was changed in place, where they lie.

    As the training loop has them.
    """

    accounts: Sequence[Account]
    gradients: Sequence[Tensor]
    versions: list[int]
    places: set[int]

    @classmethod
    def of(cls, accounts: Sequence[Account], gradients: Sequence[Tensor]) -> Lot:
        """They can be lent (`can_be_lent`), all of them."""
        versions, places = map(version_in, gradients), map(Tensor.data_ptr, gradients)
        return cls(accounts, gradients, list(versions), set(places))

    @property
    def is_lendable(self) -> bool:
        """Whether the gradients of all its accounts are lent, not copied."""
        return all(map(_lends, self.accounts))


class Loan(NamedTuple):
    """A lot that was handed over in the step that has this record, and its number."""

    number: int
    lot: Lot
    record: StepRecord


class Loans:
    """Everything that is lent now."""

    def __init__(self) -> None:
        self._loans: list[Loan] = []

    def __bool__(self) -> bool:
        return bool(self._loans)

    def add(self, number: int, lot: Lot, record: StepRecord) -> None:
        self._loans.append(Loan(number, lot, record))

    def are_untouched(self, places: Collection[int]) -> bool:
        """Whether nothing lent was changed, or lies where gradients lie now."""
        for _, lot, _ in self._loans:
            if list(map(version_in, lot.gradients)) != lot.versions:
                return False
            if places and not lot.places.isdisjoint(places):
                return False
        return True

    def touched(self, places: Collection[int]) -> list[Account]:
        """Of which accounts something was changed, or lies where gradients lie now."""
        found = {
            id(account): account
            for _, lot, _ in self._loans
            for account, gradient, version in zip(
                lot.accounts, lot.gradients, lot.versions, strict=True
            )
            if gradient._version != version or gradient.data_ptr() in places
        }
        return list(found.values())

    def is_touched(self, account: Account) -> bool:
        """Whether something that this account has lent was changed, as far as torch counts."""
        return account in self.touched(())

    def records(self, account: Account) -> Iterator[StepRecord]:
        """The steps of which a gradient of this account is lent."""
        return (record for _, lot, record in self._loans if account in lot.accounts)

    def forget(self, account: Account) -> None:
        """Nothing is lent by this account any more."""
        kept = []
        for number, lot, record in self._loans:
            left = [i for i, other in enumerate(lot.accounts) if other is not account]
            if left:
                accounts, gradients = (
                    [lot.accounts[i] for i in left],
                    [lot.gradients[i] for i in left],
                )
                versions = [lot.versions[i] for i in left]
                places = {gradient.data_ptr() for gradient in gradients}
                kept.append(Loan(number, Lot(accounts, gradients, versions, places), record))
        self._loans = kept

    def end(self, number: int) -> None:
        """Whoever reads them is done with all up to this number."""
        self._loans = [loan for loan in self._loans if loan.number > number]


def places_of(parameters: Iterable[Tensor]) -> set[int]:
    """Where their gradients lie now."""
    gradients = (parameter.grad for parameter in parameters)
    return {g.data_ptr() for g in gradients if g is not None and g.layout is torch.strided}


def natures(accounts: Sequence[Account]) -> list[tuple[object, ...]]:
    """What gradients that can be lent are like, for `can_be_lent`."""
    return [(True, False, torch.strided, account.watched.dtype) for account in accounts]


def can_be_lent(
    gradients: Sequence[Tensor], like: list[tuple[object, ...]], sizes: list[int]
) -> bool:
    """Whether nobody writes to the memory of these but by way of them, and every change is counted.

    Not so for a part of a larger buffer, as distributed training keeps them. `sizes`: in bytes.
    """
    return (
        list(map(_nature, gradients)) == like
        and not any(map(Tensor.is_inference, gradients))
        and [gradient.untyped_storage().nbytes() for gradient in gradients] == sizes
    )
