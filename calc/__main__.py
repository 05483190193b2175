"""``python -m calc``: the command line."""

from __future__ import annotations

from calc.cli import main

if __name__ == "__main__":
    main()
