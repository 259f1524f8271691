"""What `.grad` holds: since when it accumulates, and whether it was thrown away in between.

Nobody tells the recorder that gradients were reset: not `zero_grad`, not a loss scaler that skips a
step. It looks, once per backward pass and parameter, before anything is added: no gradient or only
zeros means that what was seen before no longer counts.
"""

from __future__ import annotations

from dualform.layers import Layer
from dualform.recording.clerk import Clerk
from dualform.recording.parameters import Parameters, Watched, is_reset
from dualform.recording.sink import Sink


class Gradients:
    """Follows the accumulation of every layer's gradients through one step after the other."""

    def __init__(self, parameters: Parameters, sink: Sink, clerk: Clerk) -> None:
        self._parameters = parameters
        self._sink, self._clerk = sink, clerk
        self._step = 0
        self._trained: dict[Layer, list[Watched]] = {}

    def next_step(self) -> None:
        self._trained = {}

    def notice(self, layer: Layer, backward: int, step: int) -> tuple[int, list[Watched]]:
        """Before a backward pass adds to a layer's gradients: what of them was thrown away.

        How many patterns are taken back, and whose gradients begin anew.
        """
        self._step = step
        dropped, anew = 0, []
        for watched in self._parameters.of_layer(layer):
            if watched.backward == backward or not watched.parameter.requires_grad:
                continue
            watched.backward = backward
            if not self._starts_anew(watched):
                continue
            if watched.seen != step:
                anew.append(watched)
            elif (taken := self._take_back(watched)) is not None:
                dropped += taken
                anew.append(watched)
        return dropped, anew

    def _starts_anew(self, watched: Watched) -> bool:
        """Whether the gradient was thrown away: there is none, or only zeros.

        Zeros may also be what the patterns of this step sum to (a dead layer): then nothing was.
        """
        gradient = watched.parameter.grad
        if not is_reset(gradient):
            return False
        if gradient is None or watched.seen != self._step:
            return True
        self._clerk.wait()
        return not watched.expects_nothing

    def _take_back(self, watched: Watched) -> int | None:
        """Drop the patterns of this step whose gradient was thrown away: the step was skipped.

        None if another parameter's gradient still holds them. They stay in the audit's sum then,
        and an update by what came after them is one that cannot be explained. One whose patterns
        sum to nothing (a bias before BatchNorm) has zeros either way, and goes along.
        """
        self._clerk.wait()
        held = self._sink.patterns_of_step()
        layers = [layer for layer in watched.layers if layer in held]
        parts = [part for layer in layers for part in self._parameters.of_layer(layer)]
        if not all(is_reset(p.parameter.grad) for p in parts if p.parameter.requires_grad):
            return None
        for part in parts:
            part.forget(self._step)
        for layer in layers:
            self._trained.pop(layer, None)
        return sum(self._sink.rewind(layer) for layer in layers)

    def change_of_trained(self, layer: Layer, trained: list[Watched]) -> str | None:
        """All patterns of a layer in one step go to the same parameters: what is wrong if not."""
        before = self._trained.setdefault(layer, trained)
        if before == trained:
            return None
        then, now = (", ".join(w.name for w in which) for which in (before, trained))
        return (
            f"layer {layer.name!r} trained {then} in an earlier backward pass of this step and "
            f"trains {now} now. Freeze and unfreeze between steps."
        )
