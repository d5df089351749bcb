"""How wrong are curves of scaling? ``python -m benchmarks.scale_error --data FOLDER``.

Published rows that differ in nothing but the number of GPUs and the global batch are one series.
The largest count is predicted by curves through all the others, and by curves through those up to
a quarter of it; beside them, as if nothing were lost beyond the last count of the fit. The error is
|predicted ÷ measured − 1| of tokens/s.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from fast_axolotl.plan.scale import fit_curve

_SAME = {
    "published_runs.csv": (
        *("model", "params", "hardware", "source", "task", "precision", "seq_len", "recompute"),
        *("tp", "pp", "cp", "ep", "vp"),
    ),
    "throughput_rows.csv": ("model", "accelerator", "source", "seq_len", "recompute"),
}
_LEAST = {"Amdahl": 2, "USL": 3}  # counts that a fit takes


def load(folder: Path) -> list[tuple[str, list[int], list[float]]]:
    """Name, GPUs and tokens/s of every series of three counts or more."""
    found = []
    for name, keys in _SAME.items():
        series: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
        with (folder / name).open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                gpus, each = row.get("n_gpus") or row.get("gpus"), row["tokens_per_s_per_gpu"]
                if gpus and each:
                    own = series[tuple(row[key] for key in keys)]
                    # Of several rows at one count, the fastest: the others have other batches.
                    own[int(gpus)] = max(own.get(int(gpus), 0.0), int(gpus) * float(each))
        for key, rates in series.items():
            if len(rates) > 2:
                words = f"{key[0]}, {key[1] if name.startswith('t') else key[2]}"
                found.append((words, sorted(rates), [rates[one] for one in sorted(rates)]))
    return found


def main() -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    errors: dict[str, list[float]] = defaultdict(list)
    for name, gpus, rates in load(parser.parse_args().data):
        text = []
        for reach in (1, 4):
            used = sum(reach * count <= gpus[-1] for count in gpus[:-1])
            if used < 2:
                continue
            predicted = {"no loss": rates[used - 1] / gpus[used - 1] * gpus[-1]}
            for law, least in _LEAST.items():
                if used >= least:
                    predicted[law] = fit_curve(gpus[:used], rates[:used], least).rate(gpus[-1])
            for law, rate in predicted.items():
                error = rate / rates[-1] - 1
                group = "4 times beyond or more" if reach > 1 else "the next count"
                errors[f"{group}, {law}"].append(abs(error))
                text.append(f"{law} {error:+.1%}")
            text.append(f"from {gpus[0]} to {gpus[used - 1]};")
        print(f"{name}, {gpus[-1]} GPUs: {' '.join(text)}")
    for law, some in errors.items():
        middle, high = statistics.median(some), np.quantile(some, 0.9)
        print(
            f"{law}: {len(some)} series, median {middle:.1%}, p90 {high:.1%}, worst {max(some):.1%}"
        )


if __name__ == "__main__":
    main()
