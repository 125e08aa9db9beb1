"""``python -m ecoserve``."""

from __future__ import annotations

from ecoserve.cli import main

if __name__ == "__main__":
    main()
