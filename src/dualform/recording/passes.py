"""What a backward pass brings: rows are copied, and summed to what the gradients should be.

    a layer's node is reached     take      the key and error signal are put into a parcel
    1 MB, or the pass ends        hand_over the worker copies the rows and sums δ (x·v)
    a pass begins                 begin     what was summed for gradients that are empty now is
                                            forgotten: the loop threw it away, and its rows go too
    a pass ends                   end       the worker is waited for: `backward()` is about to
                                            return, and its tensors are the loop's again

Rows belong to the next update of *their layer*: they are pending until the optimizer that owns the
layer moves (`updates.py`). Which pattern is in which gradient is never guessed: `.grad` says it,
when a pass begins.

Why it is hard: a loop may accumulate, throw gradients away, carry them over, or run one pass inside
another; and a tensor may legally be changed in place as soon as the pass is over.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod

import numpy as np
import torch
from torch import Tensor

from dualform.certificate.bounds import ROUNDING, spread
from dualform.errors import RecordingError
from dualform.layers import Layer, torch_internals
from dualform.memory.content import COMPUTED_IN
from dualform.recording.tags import Context, Tag
from dualform.recording.watched import Flags, LayerCall, Site, Watch, Watched, is_empty
from dualform.recording.worker import Worker

PARCEL = 1 << 20
"""How many bytes are handed to the worker at a time."""

CODE = {dtype: code for code, dtype in enumerate(COMPUTED_IN)}

Parcel = list[tuple[Site, Tensor, Tensor, int, int, tuple[int, ...], Context, int, int, int]]


class Passes:
    """The backward passes since the last update, one after the other."""

    def __init__(self, watch: Watch, worker: Worker) -> None:
        self.watch, self.worker = watch, worker
        self.is_recording = True
        """Whether the patterns of this step are kept (every=k)."""
        self.is_summing = True
        """Whether sums are wanted: at every step, or at some where only keys are kept."""
        self.bytes = 0
        """How much has been copied so far."""
        self.on_begin: Callable[[], None] | None = None
        """Called where a pass begins, until the first optimizer is seen."""
        self._running: int | None = None
        self._count = self._arrived = 0
        self._tags: set[Tag] = set()
        self._lengths: set[int] = set()
        """How many positions examples have in the layers that the running pass came through."""
        self._parcel: Parcel = []
        self._size = 0

    def take(
        self,
        layer: Layer,
        key: Tensor,
        signal: Tensor,
        shape: tuple[int, ...],
        context: Context,
        layout: int,
    ) -> None:
        """Take the patterns that the running pass is about to add to a layer's gradients."""
        site = self.watch.sites.get(layer)
        if site is None:
            return
        if not self.is_recording:  # a later step may use this gradient: its patterns are unknown
            self.watch.unknown[site.indices] = True
            return
        if torch_internals.running_pass() != self._running:
            self._begin()
        size = key.nbytes + signal.nbytes
        versions = torch_internals.version_of(key), torch_internals.version_of(signal)
        if key.requires_grad:  # computed by training: such rows will not come again
            site.is_given = False
        numbers = self._count, self._arrived
        self._arrived += 1
        self._parcel.append((site, key, signal, *versions, shape, context, *numbers, layout))
        self._size += size
        if self._size >= PARCEL:
            self._hand_over()

    def _begin(self) -> None:
        """Forget what was summed for gradients that are empty now, and the rows behind it."""
        if self._parcel:  # one pass inside another
            self._hand_over()
        self.watch.members.follow()
        self.watch.refuse_converted()
        if self.on_begin is not None:
            self.on_begin()
        self._running = torch_internals.running_pass()
        self._count, self._arrived = self._count + 1, 0
        self._lengths = set()
        torch_internals.at_end_of_pass(self._end)
        self.worker.wait()
        grads = [w.tensor.grad for w in self.watch.parameters]
        gone = np.array([grad is None or is_empty(grad) for grad in grads], bool)
        partly = self._drop_rows(gone)
        self.watch.forget(gone)
        self.watch.unknown[partly] = True

    def _drop_rows(self, gone: Flags) -> list[int]:
        """Take back pending rows whose gradients were thrown away, or never reached.

        Where another gradient still holds them, rows stay that one's: of the empty ones, which are
        returned, it is not known what they get from now on.
        """
        partly = []
        for site in self.watch.sites.values():
            if site.pending and any(
                gone[w.index] and self._was_written(w) for w in site.parameters.values()
            ):
                trained = [w.index for w in site.parameters.values() if w.tensor.requires_grad]
                empty = [i for i in trained if gone[i]]
                if len(empty) == len(trained):
                    site.drop_pending()
                else:
                    partly += empty
        return partly

    def _was_written(self, w: Watched) -> bool:
        """Whether an empty gradient was not: patterns that add zeros are not thrown away."""
        is_summed = self.watch.resolved[w.index]
        return w.tensor.grad is None or not is_summed or self.watch.gross[w.index] != 0

    def _hand_over(self) -> None:
        parcel, self._parcel, self._size = self._parcel, [], 0
        self.worker.do(self._keep, parcel, self.is_summing)

    def _end(self) -> None:
        self._running = None
        self.finish()
        tags, self._tags = self._tags, set()
        for tag in tags:
            tag.must_have_fitted()

    def finish(self) -> None:
        """Wait for the copies: where a pass ends, and before an update, if it was broken off."""
        if self._parcel:
            self._hand_over()
        self.worker.wait()

    # -- the worker's thread --------------------------------------------------------------------

    def _keep(self, parcel: Parcel, is_summing: bool) -> None:
        for site, key, signal, of_key, of_signal, shape, context, number, order, layout in parcel:
            tag, moves, call = context
            self._lengths.update(shape[1:2])
            if tag is not None:
                name, must_fit = site.layer.name, site.kind.tags_must_fit
                if not site.kind.has_tags(site.layer, key, shape, self._lengths):
                    tag = None
                else:
                    self._tags.add(tag)
                    tag = tag if tag.fits(name, shape, must_fit, moves) else None
            keep = self._keep_examples if site.keep == "examples" else self._keep_rows
            rows = keep(site, key, signal, is_summing)
            dtype = CODE[signal.dtype]
            used = LayerCall(number, call, order, dtype, rows, tag, shape, layout)
            site.pending.append(used)
            site.was_used = True
            now = torch_internals.version_of(key), torch_internals.version_of(signal)
            if now != (of_key, of_signal):
                raise RecordingError(
                    f"the input or the error signal of layer {site.layer.name!r} was changed in "
                    "place while its backward pass was running, so its patterns are not known; "
                    "expected both to stay as they are until backward() returns"
                )

    def _keep_rows(self, site: Site, key: Tensor, signal: Tensor, is_summing: bool) -> int:
        """Copy keys and error signals; sum δ (x·v) into what the gradients should be."""
        keys = site.parts["keys"].append(key)
        self.bytes += keys.nbytes
        count = keys.shape[0]
        u = ROUNDING[signal.dtype] * spread(count)
        if site.keep == "patterns":
            if signal.dtype.itemsize < site.weight.tensor.dtype.itemsize:
                self.watch.narrow[site.indices] = True
            signal = site.parts["error_signals"].append(signal)
            self.bytes += signal.nbytes
        if is_summing:
            signal = signal.to(site.weight.tensor.dtype)
            kind, weight, bias = site.kind, site.weight, site.bias
            if weight.tensor.requires_grad and weight.v is not None:
                along = kind.along(site.layer, keys, signal, weight.v)
                self._add(site, "weight", along, size_of(kind.gross, keys, signal) * u)
            if bias is not None and bias.tensor.requires_grad:
                size = size_of(norm, signal) * count**0.5
                self._add(site, "bias", signal.sum(0), size * u)
        else:
            self.watch.unknown[site.indices] = True
        return count

    def _keep_examples(self, site: Site, given: Tensor, signal: Tensor, is_summing: bool) -> int:
        """Copy what each example wrote: the sum over its rows of δ ⊗ x."""
        u, rows = ROUNDING[signal.dtype], 0
        long = spread(prod(site.kind.leading(given)), in_turn=True)
        for role, written in site.kind.examples(site.layer, given, signal).items():
            if role not in site.parts:
                continue
            kept = site.parts[role].append(written.flatten(1))
            rows, self.bytes = len(kept), self.bytes + kept.nbytes
            w = site.parameters.get(role)
            if w is not None and is_summing and w.tensor.requires_grad:
                total = kept.sum(0).view(written.shape[1:])
                along = total if w.v is None else total.flatten(1) @ w.v
                size = size_of(norm, kept) * rows**0.5 * long
                self._add(site, role, along, size * u)
        return rows

    def _add(self, site: Site, role: str, along: Tensor, size: float) -> None:
        self.watch.E[site.places[role]] += along.double().cpu().numpy()
        self.watch.gross[site.parameters[role].index] += size


def norm(rows: Tensor) -> float:
    """The root of the sum of squares of all entries."""
    return float(torch.linalg.vector_norm(rows))


def size_of(measure: Callable[..., float], *rows: Tensor) -> float:
    """How large rows are; in double precision where squares of theirs would be 0 or infinite."""
    size = measure(*rows)
    return size if 1e-15 < size < inf else measure(*(part.double() for part in rows))
