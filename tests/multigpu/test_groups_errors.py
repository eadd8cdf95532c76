"""Sub-groups, and errors that leave the process usable."""

import pytest
import torch
import torch.distributed as dist
from test_fused_layer import draw, shard

import fa_a2a
from fa_a2a import UlyssesAttention
from fa_a2a.errors import FaA2AError, PeerMismatchError, ShapeError, UnsupportedError


def check(group, device, heads=None):
    size = dist.get_world_size(group)
    parts = [shard(t, group) for t in draw(device, 1, 160 * size, 2 * size, 128, seed=size)]
    got = UlyssesAttention(group, kernel="fa4", exchange="fused", copy=True)(*parts)
    assert torch.equal(got, UlyssesAttention(group, kernel="fa4", exchange="collective")(*parts))


def test_case_07_two_groups(device, need):
    need("multigpu", dist.get_world_size() == 4, "needs four GPUs")
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3])]
    mine = groups[dist.get_rank() // 2]
    for _ in range(3):
        check(mine, device)
    assert len(fa_a2a.memory_bytes()) == 1
    fa_a2a.close(mine)


def test_three_of_four_ranks(device, need):
    """Rank 1's peers lie at 0, 1 and 3 strides: more than one run."""
    need("multigpu", dist.get_world_size() == 4, "needs four GPUs")
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        fa_a2a.initialize()
    else:
        for _ in range(3):
            check(group, device)
        fa_a2a.close(group)
    dist.barrier()


def test_one_rank_wrong_is_one_error_everywhere_and_recoverable(device):
    size = dist.get_world_size()
    attention = UlyssesAttention(kernel="fa4", exchange="fused")
    parts = [shard(t) for t in draw(device, 1, 128 * size, 2 * size, 128)]
    bad = [t[:, :-1] for t in parts] if dist.get_rank() == 1 else parts
    with pytest.raises(PeerMismatchError, match="seq_len"):
        attention(*bad)
    bad = [t.float() for t in parts] if dist.get_rank() == 1 else [t.half() for t in parts]
    with pytest.raises(PeerMismatchError, match=r"rank 1.*dtype"):
        attention(*bad)
    check(None, device)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t: t.float(), ShapeError),
        (lambda t: t[..., :72], UnsupportedError),
        (lambda t: t[:, :, :1], ShapeError),
        (lambda t: t[0], ShapeError),
        (lambda t: t.cpu(), FaA2AError),
    ],
)
def test_bad_input(device, change, error):
    size = dist.get_world_size()
    parts = [shard(t) for t in draw(device, 1, 128 * size, 2 * size, 128)]
    with pytest.raises(error):
        UlyssesAttention(kernel="fa4", exchange="fused")(*(change(t) for t in parts))
    check(None, device)


def test_requires_grad_is_refused(device):
    size = dist.get_world_size()
    parts = [shard(t).requires_grad_() for t in draw(device, 1, 128 * size, 2 * size, 128)]
    with pytest.raises(UnsupportedError, match="requires grad"):
        UlyssesAttention(kernel="fa4")(*parts)
    with torch.no_grad():
        UlyssesAttention(kernel="fa4")(*parts)
