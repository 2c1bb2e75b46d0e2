"""The example of the recipes: how large a batch keeps the accuracy."""

from __future__ import annotations

import re

from forking_launcher import TORCH
from framework_jobs import succeeds


def test_the_recipe_keeps_the_accuracy_at_sixteen_times_the_batch() -> None:
    printed = succeeds("../../examples/large_batch.py", "--seeds", "1", "--batches", "256", ranks=2, imports=TORCH)
    rows = re.findall(r"^batch +256 +recipe ([\d.]+)% .* not scaled ([\d.]+)%$", printed, re.MULTILINE)
    ((recipe, not_scaled),) = [tuple(map(float, row)) for row in rows]
    assert recipe > 95
    assert not_scaled < recipe
    (lost,) = re.findall(r"up to batch 256; there, ([\d.]+)% are lost without it", printed)
    assert abs(float(lost) - (recipe - not_scaled)) < 0.2  # three figures with one decimal each
