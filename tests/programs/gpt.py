"""A small GPT as nanoGPT and minGPT write it: one product for q, k and v; tied weights, or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

VOCABULARY, CONTEXT, WIDTH, HEADS = 23, 8, 16, 2


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.dropped = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        heads = (size, length, HEADS, WIDTH // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        rate = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.dropped(self.c_proj(y.transpose(1, 2).contiguous().view(size, length, WIDTH)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), SelfAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Give tokens and get logits; give targets too and get a loss beside them."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList(Block() for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.transformer["wte"].weight = self.lm_head.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        parts = self.transformer
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = parts["wte"](tokens) + parts["wpe"](positions)
        for block in parts["h"]:  # type: ignore[union-attr]
            x = block(x)
        x = parts["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self) -> AdamW:
        """Matrices decay, gains and biases do not."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
