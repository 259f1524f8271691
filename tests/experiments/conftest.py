"""The experiments are scripts that import each other by name, as `python experiments/…` does."""

from __future__ import annotations

import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"

sys.path.insert(0, str(EXPERIMENTS))
