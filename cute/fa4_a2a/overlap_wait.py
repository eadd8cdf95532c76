"""The load warp of the overlapped kernel: where it loads from, and when it waits for a peer. Mixed into OverlapForward.

Upstream's load loop calls `load_KV` for each block of keys, from the last to the first, and loads Q behind the first of
them. So that is where a wait goes: for the queries' part before a tile of a peer's chunk, and for each part of keys and
values before the first block that holds a row of it. V's block was K's one call before.

Acquire side, and why what is loaded is what the peer sent. Every lane acquires the part's word itself, by
ld.acquire.sys. It finds the epoch, or a later one, of the call in which the peer's last sender released its stores
(overlap_send.py), so all of them happen before what follows here. fence.proxy.async then orders that before the bulk
loads that this lane starts (variant `bulk_read` of litmus.py). A part once acquired is remembered: later tiles of this
CTA follow in program order. Other CTAs acquire for themselves.

Writing to the owner of chunk c (O and LSE of its tile) comes after its queries' part, which it sends in call n, behind
its last use of the output of call n-1 in stream order: the argument of comm/workspace.py with the queries' part in the
place of `arrived`. The own chunk's output is this rank's own.

A load warp spins while other warps of its CTA go on: the sending warps need nothing of it, nor of any peer. What a peer
waits for is therefore sent whatever this rank waits for, as soon as one CTA of this rank runs (the last unit's sender
publishes, whichever CTA it is in). Ranks cannot wait for each other in a ring.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute as cute_ir
from cutlass.cute.nvgpu.cpasync.copy import CopyBulkTensorTileG2SNonExecTrait
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from quack.copy_utils import get_tma_desc_addr

from . import ptx
from .overlap import Counter
from .overlap_schedule import locate
from .persistent_schedule import scheduler
from .signal import ARRIVED, EPOCH, FINGERPRINT, MAX_PARTS, PARTS, TOLD, Failure, Word
from .signal_kernel import LOOKS_A_NOTICE, POLL_NS, Signal, ends, reached

# of `state`: the tile being loaded, its head's part, next chunk to wait for, parts acquired (bits), whether Q and the
# block of K or V come from the inputs
TILE, GROUP, CHUNK, HAVE, OWN_Q, OWN_KV = range(6)
BITS = 31
DESCRIPTOR_BYTES = 128
OTHERS_NS = 1_000_000  # a CTA whose wait failed leaves the report to the first one for so long


class Either(CopyBulkTensorTileG2SNonExecTrait):
    """A bulk load whose descriptor is chosen when it is issued: the inputs' where `state[flag]` says so."""

    def __init__(self, value: Any, own: cute.CopyAtom, workspace: cute.CopyAtom, state: Any, flag: int):
        super().__init__(value)
        self.own, self.workspace, self.state, self.flag = own, workspace, state, flag

    def __new_from_mlir_values__(self, values: Any) -> Either:
        return Either(values[0], self.own, self.workspace, self.state, self.flag)

    def unpack(self, *, loc: Any = None, ip: Any = None, **options: Any) -> Any:
        at = choose(self.state[self.flag], descriptor(self.own), descriptor(self.workspace))
        aligned = cute_ir.assume(cute_ir.ConstrainedIntType.get(DESCRIPTOR_BYTES, 64), at.ir_value(loc=loc, ip=ip))
        kind = ir.Type.parse(f"!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<{DESCRIPTOR_BYTES}>>")
        return super().unpack(loc=loc, ip=ip, tma_desc_ptr=cute_ir.inttoptr(kind, aligned), **options)


def descriptor(atom: cute.CopyAtom) -> Int64:
    return get_tma_desc_addr(atom).toint()


@cute.jit
def choose(own: Int32, yes: Int64, no: Int64):
    at = no
    if own != 0:
        at = yes
    return at


class Waits:
    def begin_load(self, params: Any) -> None:
        self.load_params = params
        self.state = cute.make_rmem_tensor(6, Int32)
        for at in range(6):
            self.state[at] = Int32(0)
        self.state[TILE] = cute.arch.block_idx()[0] - cute.arch.grid_dim()[0]  # the first block goes one on

    def load(self, *arguments: Any) -> None:
        changed = list(arguments)
        make_scheduler = scheduler(arguments)
        params = make_scheduler().params
        self.begin_load(params)
        own = params.overlap.q_atom, params.overlap.k_atom, params.overlap.v_atom
        for i, (atom, flag) in enumerate(zip(own, (OWN_Q, OWN_KV, OWN_KV))):
            there = changed[6 + i]
            trait = Either(there._trait.value, atom, there, self.state, flag)
            changed[6 + i] = cute.CopyAtom(there.op, trait)
        FlashAttentionForwardSm90.load(self, *changed)
        self.after_load(arguments[3], make_scheduler)

    @cute.jit
    def load_KV(self, tma_load_fn, paged_kv_manager, sX, block, pipeline_kv, producer_state, K_or_V, page_idx=None):
        if const_expr(K_or_V == "K"):
            self.before_keys(block)
        self.state[OWN_KV] = Int32(block >= self.first_block_within(0))
        FlashAttentionForwardSm90.load_KV(
            self, tma_load_fn, paged_kv_manager, sX, block, pipeline_kv, producer_state, K_or_V, page_idx
        )

    def first_block_within(self, chunk: Any) -> Int32:
        """From which block of keys on there are rows of the chunks up to `chunk` alone. They lie at the end."""
        params = self.load_params
        return cute.ceil_div(params.overlap.keys - (chunk + 1) * params.rows, self.tile_n)

    @cute.jit
    def before_keys(self, block: Int32):
        state, params = self.state, self.load_params
        overlap = params.overlap
        if block == cute.ceil_div(overlap.keys, self.tile_n) - 1:
            tile = state[TILE] + cute.arch.grid_dim()[0]
            _, head, chunk = locate(params, overlap.own_first, tile)
            state[TILE] = tile
            state[GROUP] = head // overlap.group_heads
            state[CHUNK] = Int32(1)
            state[OWN_Q] = Int32(chunk == 0)
            if chunk != 0:
                self.wait_for(chunk, overlap.kv_parts)
        chunk = state[CHUNK]
        while chunk < params.num_chunks and block < self.first_block_within(chunk - 1):
            if chunk == 1 and overlap.own_rows > 0:
                self.wait_for(Int32(0), Int32(0))
            self.wait_for(chunk, state[GROUP])
            chunk += 1
        state[CHUNK] = chunk

    @cute.jit
    def wait_for(self, chunk: Int32, part: Int32):
        """Acquires part `part` of the rank whose chunk is `chunk`."""
        state, overlap = self.state, self.load_params.overlap
        bit = chunk * (overlap.kv_parts + 1) + part
        if bit > BITS or (state[HAVE] >> bit) & 1 == 0:
            self.acquire(chunk, part)
            ptx.fence_proxy_async()
            if bit <= BITS:
                state[HAVE] = state[HAVE] | (Int32(1) << bit)

    @cute.jit
    def acquire(self, chunk: Int32, part: Int32):
        overlap, release = self.load_params.overlap, self.load_params.release
        source = overlap.sources[chunk]
        own = release.peer_blocks[release.rank]
        word, mark = own + 8 * (PARTS + MAX_PARTS * source + part), own + 8 * (FINGERPRINT + source)
        epoch = ptx.load_relaxed_sys(own + 8 * EPOCH) + 1
        until = ptx.globaltimer() + release.deadline_ns
        code, looks, notice = Int32(int(Failure.DEADLINE)), Int32(0), Int64(0)
        watched = chunk
        while code == int(Failure.DEADLINE) and ptx.globaltimer() < until:
            if reached(ptx.load_acquire_sys(word), epoch):
                code = Int32(int(Failure.NONE))
            elif self.departs(own, overlap.sources[watched], epoch):
                code, chunk = Int32(int(Failure.FINGERPRINT)), watched
            elif looks % LOOKS_A_NOTICE == LOOKS_A_NOTICE - 1:
                notice = ptx.load_relaxed_sys(own + 8 * TOLD)
                if notice != 0 and ends(notice, 2 * epoch + Int64(int(Word.READY))):
                    code = Int32(int(Failure.TOLD))  # some rank does not end this call
            looks += 1
            # Every peer in turn: the one waited for may have ended over another one's mark, its part unsent.
            watched += 1
            if watched >= self.load_params.num_chunks:
                watched = Int32(0)
            if code == int(Failure.DEADLINE):
                ptx.nanosleep(POLL_NS)
        if code == int(Failure.NONE) and ptx.load_relaxed_sys(mark) != overlap.fingerprint:
            code = Int32(int(Failure.FINGERPRINT))  # the mark was released before the word
        if code != int(Failure.NONE):
            self.fail(code, chunk, part, notice)

    @cute.jit
    def departs(self, own: Int64, source: Int64, epoch: Int64) -> Boolean:
        """A peer that makes another call says so in `arrived`, and never sends the part."""
        other = Boolean(False)
        if reached(ptx.load_acquire_sys(own + 8 * (ARRIVED + source)), epoch):
            mark = ptx.load_relaxed_sys(own + 8 * (FINGERPRINT + source))
            other = mark != self.load_params.overlap.fingerprint
        return other

    @cute.jit
    def fail(self, code: Int32, chunk: Int32, part: Int32, notice: Int64):
        """The first of this GPU's warps to fail writes the record, tells the peers and traps, which ends the kernel."""
        overlap, release = self.load_params.overlap, self.load_params.release
        if code == int(Failure.FINGERPRINT):
            # The trap may end the warp that does so before it has: the peer would wait out its deadline.
            self.open_call(overlap, release, cute.arch.lane_idx())
            cute.arch.sync_warp()  # all lanes' words come before the fences of `report`, and so before the trap
        if cute.arch.lane_idx() == 0:
            claim = overlap.counters.iterator.toint() + 8 * int(Counter.FAULT)
            if ptx.add_relaxed_gpu(claim, Int64(1)) != 0:
                until = ptx.globaltimer() + OTHERS_NS
                while ptx.globaltimer() < until:
                    ptx.nanosleep(1000)
            else:
                source, own = overlap.sources[chunk], release.peer_blocks[release.rank]
                epoch = ptx.load_relaxed_sys(own + 8 * EPOCH) + 1
                found_fingerprint = notice
                if code != int(Failure.TOLD):
                    found_fingerprint = ptx.load_relaxed_sys(own + 8 * (FINGERPRINT + source))
                if code == int(Failure.DEADLINE):
                    step = 2 * epoch + Int64(int(Word.READY))
                    Signal().tell(release.peer_blocks, release.rank, release.num_ranks, Int32(source), step)
                Signal().report(
                    release.record,
                    code,
                    Int32(int(Word.ARRIVED)),
                    release.rank,
                    Int32(source),
                    epoch,
                    ptx.load_relaxed_sys(own + 8 * (PARTS + MAX_PARTS * source + part)),
                    overlap.fingerprint,
                    found_fingerprint,
                )
        cute.arch.sync_warp()
        ptx.trap()
