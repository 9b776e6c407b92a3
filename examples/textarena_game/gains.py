"""What runs of several seeds gained from the first policy to the last, with a t interval over the seeds.

python examples/textarena_game/gains.py runs/secretary/seed-*
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from lightning_mtrl.evaluation.intervals import mean_interval


def main(folders: list[str]) -> None:
    """Print one line for each run, and one for all."""
    gains = []
    for folder in folders:
        rows = json.loads((Path(folder) / "summary.json").read_text())["iterations"]
        rates = [row["success_rate"] for row in rows]
        gains.append(rates[-1] - rates[0])
        dropped = sum(sum(row["dropped"].values()) for row in (rows[0], rows[-1]))
        print(
            f"{folder}: {' '.join(f'{rate:.3f}' for rate in rates)}, gain {gains[-1]:+.3f}; games "
            f"{rows[0]['conversations']} and {rows[-1]['conversations']}, dropped {dropped}"
        )
    low, high = mean_interval(gains)
    print(f"mean gain {fmean(gains):+.3f}, 95% t interval over {len(gains)} seeds [{low:+.3f}, {high:+.3f}]")


if __name__ == "__main__":
    main(sys.argv[1:])
