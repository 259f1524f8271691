"""`nn.Embedding`: every token looked up is one pattern.

Token ids of shape [B, L] give B·L patterns. Look-ups that torch does something else with stay out:
`max_norm` rewrites the weight in the forward pass, `scale_grad_by_freq` divides the gradient by how
often a token occurs, `sparse` gives no gradient that could be compared.
"""

from __future__ import annotations

from torch import Tensor, nn


def is_look_up(module: nn.Module) -> bool:
    """Whether the module looks up rows of its weight, and nothing else."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and "forward" not in vars(module)  # replaced on this very module
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def without_padding(error_signal: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
    """The error signals [..., d] that reach the weight: none of the padding token's do."""
    if padding is None or padding < 0:
        return error_signal
    return error_signal.masked_fill((tokens == padding).unsqueeze(-1), 0.0)
