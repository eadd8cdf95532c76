"""Ranks of an exchange that all live on one GPU, and tensors for them."""

import torch

GUARD = 64  # elements around every buffer


class Ranks:
    """Symmetric buffers and signal blocks of P ranks, all on one GPU, poisoned; one plan for each rank."""

    def __init__(self, kernel, device, batch, rows, heads, dim, ranks, dtype, num_ctas=None, own_last=False):
        from fa4_a2a.scatter import ScatterPlan
        from fa4_a2a.signal import BLOCK_WORDS, RECORD_WORDS

        self.size, self.shape = ranks, (batch, rows, heads, dim)
        there = (batch, ranks * rows, heads // ranks, dim)
        numel = torch.Size(there).numel()
        self.whole = torch.full((3, ranks, numel + 2 * GUARD), float("nan"), device=device, dtype=dtype)
        self.buffers = self.whole[:, :, GUARD : GUARD + numel].view(3, ranks, *there)
        self.blocks = torch.zeros(ranks, BLOCK_WORDS, dtype=torch.int64, device=device)
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=True)
        addresses = [[self.buffers[t, p].data_ptr() for p in range(ranks)] for t in range(3)]
        blocks = torch.tensor([self.blocks[p].data_ptr() for p in range(ranks)], device=device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.chunk_at = [[(rank - p) % ranks for p in range(ranks)] for rank in range(ranks)]
        self.plans = [
            ScatterPlan(
                kernel, self.shape, rank, addresses, self.chunk_at[rank], blocks, self.record.data_ptr(),
                num_ctas or sms, own_last,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def want(self, qkv):
        """The buffers after all ranks have sent: qkv[rank] is (q, k, v)."""
        wanted = torch.full_like(self.whole, float("nan"))
        view = wanted[:, :, GUARD:-GUARD].view(self.buffers.shape)
        _, rows, heads, _ = self.shape
        local = heads // self.size
        for rank, tensors in enumerate(qkv):
            for t, x in enumerate(tensors):
                for p in range(self.size):
                    at = rows * (self.chunk_at[rank][p] if t == 0 else rank)
                    view[t, p, :, at : at + rows] = x[:, :, p * local : (p + 1) * local]
        return wanted

    def check(self, qkv):
        """Bitwise, guards included."""
        got, want = (x.view(torch.int16) for x in (self.whole, self.want(qkv)))
        assert torch.equal(got, want), f"{int((got != want).sum())} of {got.numel()} elements differ"


def draw(device, shape, dtype, layout="plain"):
    """q, k, v: three tensors, or views of one fused projection (B, s, 3, H, D) or (B, s, H, 3, D)."""
    batch, rows, heads, dim = shape
    if layout == "plain":
        return [torch.randn(shape, device=device).to(dtype) for _ in range(3)]
    if layout == "fused":
        return torch.randn(batch, rows, 3, heads, dim, device=device).to(dtype).unbind(2)
    if layout == "by_head":
        return torch.randn(batch, rows, heads, 3, dim, device=device).to(dtype).unbind(3)
    assert layout == "heads_first"
    return [torch.randn(batch, heads, rows, dim, device=device).to(dtype).transpose(1, 2) for _ in range(3)]
