"""EcoServe: LLM serving with prefill and decode separated in time."""

from __future__ import annotations

__version__ = "0.1.0"
