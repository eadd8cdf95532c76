"""The layer on real GPUs: movement, bitwise equality with the serial path, error against float32 attention."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fa_a2a
from fa_a2a import HeadShards, UlyssesAttention, attention_gather, scatter_heads
from fa_a2a.ops.kernel_choice import BEST_KNOWN


def draw(device, batch, seq, heads, dim, dtype=torch.bfloat16, seed=0):
    """q, k, v of the whole sequence, the same on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(batch, seq, heads, dim, device=device, generator=generator).to(dtype) for _ in range(3)]


def shard(x, group=None):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]


def coded(device, batch, seq, heads, dim):
    """Each element encodes batch, position and head in bits that bfloat16 keeps: a mismatch names the wrong owner."""
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    s = torch.arange(seq, device=device).view(1, -1, 1, 1)
    h = torch.arange(heads, device=device).view(1, 1, -1, 1)
    low = (s % 128).expand(batch, seq, heads, dim)
    code = torch.where(torch.arange(dim, device=device) % 3 == 0, low, (s // 128 + 0 * low))
    code = torch.where(torch.arange(dim, device=device) % 3 == 1, h + 64 * b + 0 * low, code)
    return code.to(torch.bfloat16)


@pytest.mark.parametrize(("batch", "dim"), [(1, 128), (2, 64)])
def test_scatter_moves_every_row_to_its_owner(device, batch, dim):
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = coded(device, batch, 144 * size, 3 * size, dim)
    shards = scatter_heads(shard(whole), shard(whole) + 1, shard(whole) + 2, exchange="fused", kernel="fa4")
    want = whole[:, :, 3 * rank : 3 * rank + 3]
    owners = [(rank + c) % size for c in range(size)]
    assert torch.equal(shards._q, torch.cat([want.chunk(size, 1)[o] for o in owners], 1))
    assert torch.equal(shards._k, want + 1)
    assert torch.equal(shards._v, want + 2)
    attention_gather(shards)


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "dim", "dtype"),
    [
        (1, 1152, 6, 128, torch.bfloat16),
        (1, 1152, 6, 128, torch.float16),
        (1, 100, 1, 128, torch.bfloat16),  # S/P not a multiple of any tile
        (2, 321, 2, 64, torch.bfloat16),
        (3, 192, 2, 64, torch.float16),
    ],
)
def test_fused_equals_serial_bitwise_and_float32_closely(device, batch, rows, heads, dim, dtype):
    size = dist.get_world_size()
    q, k, v = draw(device, batch, rows * size, heads * size, dim, dtype)
    parts = [shard(t) for t in (q, k, v)]
    fused = UlyssesAttention(kernel="fa4", exchange="fused")
    fused(*parts).fill_(float("nan"))
    got = fused(*parts)
    assert torch.equal(got, UlyssesAttention(kernel="fa4", exchange="collective")(*parts))
    first = [t[..., : 2 * heads, :].float().transpose(1, 2) for t in (q, k, v)]
    want = shard(F.scaled_dot_product_attention(*first).transpose(1, 2))
    torchs = F.scaled_dot_product_attention(*(t[..., : 2 * heads, :].transpose(1, 2) for t in (q, k, v)))
    limit = (shard(torchs.transpose(1, 2)).float() - want).abs().max()
    assert (got[..., : 2 * heads, :].float() - want).abs().max() <= 2 * limit


def test_auto_takes_the_fused_path(device):
    size = dist.get_world_size()
    attention = UlyssesAttention()
    attention(*(shard(t) for t in draw(device, 1, 128 * size, 2 * size, 128)))
    assert attention.last_plan.kernel in BEST_KNOWN and attention.last_plan.exchange == "fused"


def test_peers_lie_at_one_stride(device):
    size = dist.get_world_size()
    shards = scatter_heads(*(shard(t) for t in draw(device, 1, 128 * size, 2 * size, 128)), kernel="fa4")
    attention_gather(shards)
    from fa_a2a.comm.group import resolve
    from fa_a2a.ops.fused import peer_sink

    sink = peer_sink(resolve(None).workspace, shards._plan.shape, torch.bfloat16)
    assert [run.length for run, _, _ in sink.by_run] == [size]


def test_lse(device):
    size = dist.get_world_size()
    q, k, v = draw(device, 2, 160 * size, 2 * size, 128)
    _, lse = UlyssesAttention(kernel="fa4", exchange="fused")(*(shard(t) for t in (q, k, v)), return_lse=True)
    _, serial = UlyssesAttention(kernel="fa4", exchange="collective")(*(shard(t) for t in (q, k, v)), return_lse=True)
    scores = q.float().transpose(1, 2) @ k.float().transpose(1, 2).mT * 128**-0.5
    want = scores.logsumexp(-1).chunk(size, dim=2)[dist.get_rank()]
    assert torch.equal(lse, serial)
    torch.testing.assert_close(lse, want, rtol=0, atol=5e-4)


def test_head_sharded_inputs(device):
    size, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = draw(device, 1, 128 * size, 2 * size, 128)
    mine = [t[:, :, 2 * rank : 2 * rank + 2].contiguous() for t in (q, k, v)]
    got, _ = attention_gather(HeadShards.from_tensors(*mine, kernel="fa4", exchange="fused"))
    assert torch.equal(got, UlyssesAttention(kernel="fa4", exchange="collective")(*(shard(t) for t in (q, k, v))))


def test_strided_inputs(device):
    size = dist.get_world_size()
    fused_qkv = torch.randn(1, 128, 2 * size, 3, 128, device=device, dtype=torch.bfloat16)
    views = fused_qkv.unbind(3)
    got = UlyssesAttention(kernel="fa4", exchange="fused")(*views)
    assert torch.equal(got, UlyssesAttention(kernel="fa4", exchange="collective")(*(t.contiguous() for t in views)))


def test_case_09_workspace_is_grow_only_and_bounded(device):
    size = dist.get_world_size()
    attention = UlyssesAttention(kernel="fa4", exchange="fused")
    largest = 0
    for rows in (128, 1024, 256, 512, *range(64, 1024, 48)):
        attention(*(shard(t) for t in draw(device, 1, rows * size, 2 * size, 64)))
        (held,) = fa_a2a.memory_bytes().values()
        largest = max(largest, rows)
        per_tensor, lse = largest * size * 2 * 64 * 2, largest * size * 2 * 4
        assert 4 * per_tensor + lse <= held <= 4 * per_tensor + lse + 48 * 1024


def test_guards_stay_untouched(device):
    from fa_a2a.comm.group import resolve

    size = dist.get_world_size()
    for rows, dim in ((100, 128), (333, 64), (1152, 128)):
        attention = UlyssesAttention(kernel="fa4", exchange="fused")
        attention(*(shard(t) for t in draw(device, 1, rows * size, 2 * size, dim)), return_lse=True)
        torch.cuda.synchronize()
        dist.barrier()
        assert resolve(None).workspace.damaged_guards() == []
