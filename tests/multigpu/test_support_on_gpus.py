"""Every row of the README's list of shapes, on the path that it names for GPUs."""

import pytest
import torch
import torch.distributed as dist
from situations import Situation, run

from fa_a2a import UlyssesAttention
from fa_a2a.bench.support import FUSED, LOCAL, SUPPORT


@pytest.mark.parametrize("row", SUPPORT, ids=lambda row: row.what)
def test_row_takes_the_path_that_the_readme_names(device, row):
    size, rank = dist.get_world_size(), dist.get_rank()
    case = Situation(dtype="bfloat16", **{**row.call, "heads": max(row.call["heads"], size)})
    layer = UlyssesAttention(kernel="fa4", exchange="auto" if row.gpu == LOCAL else "fused")
    kernel, exchange, _, out = run(case, rank, size, layer, True, device)
    assert (kernel, exchange) == ("fa4", row.exchange)
    assert row.gpu == LOCAL or layer.last_plan.adapter.can_release == (row.gpu == FUSED)
    if not case.causal:  # whose serial path cuts its tiles elsewhere
        serial = UlyssesAttention(kernel="fa4", exchange="collective")
        assert torch.equal(run(case, rank, size, serial, True, device)[3], out)


@pytest.mark.parametrize("text", [0, 33])
def test_causal_with_key_lengths(device, text):
    """Rows before and behind the end of the keys, on the fused path and over collectives with both kernels."""
    size, rank = dist.get_world_size(), dist.get_rank()
    case = Situation(2, 200 * size, 8, 4, 128, "bfloat16", "equal", text, (200 * size - 41, 67), True)
    layers = [UlyssesAttention(kernel="fa4", exchange=e) for e in ("fused", "collective")]
    for layer in layers:
        run(case, rank, size, layer, True, device)
    run(case, rank, size, UlyssesAttention(kernel="torch"), False, device)
