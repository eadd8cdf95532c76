"""diffusers models on several processes: the output of the single process, or one clear error."""

import pytest

pytest.importorskip("diffusers")
from diffusion_models import build, clean, forward, parallel

import fa_a2a
from fa_a2a.comm import collectives
from fa_a2a.ops import fused
from fa_a2a.ops.kernels import Sink

TOLERANCE = 1e-5  # float32; outputs are of the order of 1


def heads_in_the_wrong_place():
    """Each rank stores its heads where its neighbour's belong."""
    right = fused.peer_sink

    def wrong(workspace, shape, dtype):
        sink = right(workspace, shape, dtype)
        shift = (1 - 2 * workspace.group.rank) * shape.local_heads  # of two ranks
        o = tuple(x.as_strided(x.shape, x.stride(), x.storage_offset() + shift * shape.head_dim) for x in sink.o)
        return Sink(o, sink.lse)

    fused.peer_sink = wrong


def owners_swapped():
    """Each tile goes to the rank that does not own it."""
    right = fused.peer_sink

    def wrong(workspace, shape, dtype):
        sink = right(workspace, shape, dtype)
        return Sink(sink.o[::-1], sink.lse[::-1])

    fused.peer_sink = wrong


def heads_rolled():
    right = collectives.gather_heads
    collectives.gather_heads = lambda x, group: right(x, group).roll(1, dims=2)


WRONG = {"heads": heads_in_the_wrong_place, "owners": owners_swapped, "rolled": heads_rolled}


def difference(rank, size, name, wrong=None, **options):
    """Largest difference between the parallel model's output and the single one's; twice, as buffers are reused."""
    model, inputs = build(name)
    want = forward(model, inputs)
    saved = fused.peer_sink, collectives.gather_heads
    if wrong:
        WRONG[wrong]()
    other = None
    try:
        other = parallel(model, size, timeout_s=20, **options)
        got = [forward(other, inputs) for _ in range(2)]
    finally:
        fused.peer_sink, collectives.gather_heads = saved
        clean(other)
    assert want.isfinite().all() and want.abs().max() > 0.1
    return max((x - want).abs().max().item() for x in got)


@pytest.mark.parametrize("name", ["flux", "wan", "qwen", "qwen_masked", "hunyuan_video", "sd3", "cogvideox", "z_image"])
def test_equals_the_single_process_model(ranks, name):
    assert max(ranks(2).run(difference, name=name)) < TOLERANCE


@pytest.mark.parametrize("name", ["flux", "qwen_masked"])
def test_equals_the_single_process_model_on_four_ranks(ranks, name):
    assert max(ranks(4).run(difference, name=name)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "wrong"), [("flux", "heads"), ("wan", "owners"), ("qwen", "owners"), ("qwen_masked", "rolled")]
)
def test_a_wrong_exchange_is_seen(ranks, name, wrong):
    assert min(ranks(2).run(difference, name=name, wrong=wrong)) > 100 * TOLERANCE


def beside_each_other(rank, size):
    """Two pairs of ranks, each with other inputs."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (size // 2, 1, 2), mesh_dim_names=("data", "ring", "ulysses"))
    model, inputs = build("flux")
    inputs["hidden_states"] = inputs["hidden_states"] * (1 + mesh.get_local_rank("data"))
    other = parallel(model, 2, mesh=mesh)
    try:
        return (forward(other, inputs) - forward(model, inputs)).abs().max().item()
    finally:
        fa_a2a.close(mesh["ulysses"])
        clean(other)


def test_an_axis_of_a_larger_mesh(ranks):
    assert max(ranks(4).run(beside_each_other)) < TOLERANCE
