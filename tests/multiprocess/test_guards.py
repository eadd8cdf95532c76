"""Where a call writes: every byte of every rank's workspace that the call's tensors do not cover keeps its value."""

import pytest
import torch
import torch.distributed as dist
from workers import inputs

import fa_a2a
from fa_a2a import UlyssesAttention
from fa_a2a.comm.group import resolve
from fa_a2a.layout import BUFFER_NAMES

CANARY = 0x5C
ODD = [  # batch, rows, heads of a rank, head_dim, dtype
    (1, 1, 1, 8, "float32"),
    (1, 1, 1, 8, "bfloat16"),
    (1, 7, 3, 24, "float16"),
    (2, 63, 1, 72, "bfloat16"),
    (2, 65, 2, 40, "float32"),
    (3, 33, 5, 8, "float16"),
    (5, 13, 1, 136, "bfloat16"),
    (1, 129, 1, 64, "float32"),
]


def stray_writes(rank, size, with_lse):
    """For each odd shape, in a workspace made for larger ones: (bytes written to outside the tensors, elements of the
    output that are still poison)."""
    fa_a2a.close()
    layer = UlyssesAttention(kernel="cpu", exchange="fused")
    layer(*inputs(rank, size, rows=140, heads=2 * size, batch=3, dim=72))
    workspace = resolve(None).workspace
    at, own = workspace.map, workspace.block.peers[rank]
    guards = torch.zeros(own.numel(), dtype=torch.bool)
    for offset, nbytes in at.guards():
        guards[offset : offset + nbytes] = True
    found = []
    for seed, (batch, rows, heads, dim, dtype) in enumerate(ODD):
        parts = inputs(rank, size, rows=rows, heads=heads * size, batch=batch, dim=dim, dtype=dtype, seed=seed)
        layer(*parts, return_lse=with_lse)  # agreed on, so that nothing but the call itself runs below
        dist.barrier()
        canaries = torch.full_like(own, CANARY)
        canaries[guards] = own[guards]
        for name in ("o", "lse"):
            canaries[at.offset(name) : at.offset(name) + at.capacity(name)] = 0xFF  # NaN in every dtype
        own.copy_(canaries)
        dist.barrier()
        result = layer(*parts, return_lse=with_lse)
        dist.barrier()
        out, lse = result if with_lse else (result, torch.zeros(1))
        written = own != canaries
        for name in BUFFER_NAMES:
            used = batch * heads * size * rows * (4 if name == "lse" else dim * parts[0].itemsize)
            if name != "lse" or with_lse:
                written[at.offset(name) : at.offset(name) + used] = False
        found.append((int(written.sum()), int(out.isnan().sum() + lse.isnan().sum()), workspace.damaged_guards()))
    fa_a2a.close()
    return found


@pytest.mark.parametrize(("size", "with_lse"), [(2, True), (3, False), (4, True), (8, False)])
def test_nothing_is_written_where_it_does_not_belong(ranks, size, with_lse):
    assert ranks(size).run(stray_writes, with_lse=with_lse) == [[(0, 0, [])] * len(ODD)] * size
