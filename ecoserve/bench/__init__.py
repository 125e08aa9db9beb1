"""Load against a live OpenAI-compatible endpoint, and what it found."""
