"""Lets `python -m lightning_mtrl` be the command line."""

from __future__ import annotations

import sys

from lightning_mtrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
