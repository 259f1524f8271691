"""How a tensor lies in memory, as one small number, and a tensor that lies so again.

A sum's last bits depend on the order of its terms, and torch adds in the order of memory: the bias
of a layer whose error signal comes transposed or is one number repeated, or the product with an
input that is stored column by column, have other bits than the same rows stored one by one. Such
uses are rare; they say how they lay, and their gradients are computed from rows that lie so again.

The number is 9 and then the dimensions in their order in memory, slowest first; those that are
repeated (expanded) are left out. 0 stands for rows one by one. Gaps make no difference.
"""

from __future__ import annotations

from torch import Tensor


def code_of(tensor: Tensor) -> int:
    """How a tensor lies."""
    if tensor.is_contiguous() or not 2 <= tensor.dim() <= 8:
        return 0
    sizes, strides = tensor.shape, tensor.stride()
    own = [d for d, stride in enumerate(strides) if stride or sizes[d] == 1]
    return int("9" + "".join(str(d) for d in sorted(own, key=lambda d: -strides[d])))


def restored(rows: Tensor, shape: tuple[int, ...], code: int) -> Tensor:
    """Rows [n, d] of a use of some leading shape, lying as the code says."""
    if not code:
        return rows
    whole = once = rows.view(*shape, -1)
    own = [int(digit) for digit in str(code)[1:]]
    repeated = [d for d in range(whole.dim()) if d not in own]
    for d in repeated:
        once = once.narrow(d, 0, 1)
    order = repeated + own
    lying = once.permute(order).contiguous()
    return lying.permute([order.index(d) for d in range(len(order))]).expand(whole.shape)


_BASE = 10**9
EXCHANGED = _BASE**2
"""Added to the number: the first two dimensions change places before the product is taken, as
`nn.MultiheadAttention` does when it is given the batch first."""


def code_of_pair(one: Tensor, other: Tensor) -> int:
    """Both in one number."""
    return code_of(one) * _BASE + code_of(other)


def split(code: int) -> tuple[int, int, bool]:
    """The two that `code_of_pair` put together, and whether `EXCHANGED` was added."""
    return code % EXCHANGED // _BASE, code % _BASE, code >= EXCHANGED
