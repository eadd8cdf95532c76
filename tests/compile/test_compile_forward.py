import pytest
from cubin import instructions, no_local_memory, uses
from device_view import FLOAT, attention_views, device_view
from fa4_a2a.forward import FORWARD_TILES, alike_tiles, forward_tile, forward_tile_rows, load_forward

NUM_SMS = {"sm_90a": 132, "sm_100a": 148}
CASES = [
    ("sm_90a", 128, "bfloat16", None, True),
    ("sm_90a", 128, "float16", (128, 160), False),
    ("sm_90a", 64, "bfloat16", None, False),
    ("sm_90a", 64, "float16", None, True),
    ("sm_90a", 64, "bfloat16", (128, 128), False),
    ("sm_90a", 64, "float16", (128, 128), True),
    ("sm_100a", 128, "bfloat16", None, True),
    ("sm_100a", 64, "float16", None, False),
]
P, ROWS, KEYS, HEADS, D = 4, 1152, 4608, 6, 128


def load(arch, head_dim, dtype, tile, with_lse):
    return load_forward(head_dim, dtype, arch, NUM_SMS[arch], tile, with_lse)


@pytest.mark.parametrize(("arch", "head_dim", "dtype", "tile", "with_lse"), CASES)
def test_forward_compiles_to_tensor_cores_and_bulk_copies(arch, head_dim, dtype, tile, with_lse, sass):
    load(arch, head_dim, dtype, tile, with_lse)
    chosen = list(forward_tile(head_dim, arch, tile))
    lines = sass(f"forward-{arch}-d{head_dim}-{dtype}", with_lse=with_lse, tile=chosen)
    assert uses(lines, {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA"}[arch])
    assert uses(lines, "UTMALDG")
    assert uses(lines, "UTMASTG")
    assert no_local_memory(lines)


@pytest.mark.parametrize(
    ("head_dim", "heads_per_kv", "causal"),
    [(96, 1, False), (256, 1, False), (128, 1, True), (64, 4, True), (128, 5, False)],
)
def test_other_head_dims_causal_and_grouped_heads(head_dim, heads_per_kv, causal, sass):
    load_forward(head_dim, "float16", "sm_90a", 132, heads_per_kv=heads_per_kv, causal=causal)
    key = {"heads_per_kv": heads_per_kv, "with_lse": False, "tile": list(forward_tile(head_dim, "sm_90a"))}
    if causal:
        key["causal"] = True
    lines = sass(f"forward-sm_90a-d{head_dim}-float16", **key)
    assert uses(lines, "HGMMA") and uses(lines, "UTMALDG") and uses(lines, "UTMASTG")
    assert no_local_memory(lines)


def test_forward_is_the_upstream_kernel(sass, tmp_path):
    """Shared extents and our own launch change nothing on the device, instruction for instruction."""
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32
    from cutlass.cute.runtime import make_fake_tensor
    from fa4_a2a.toolchain import compile_for
    from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
    from flash_attn.cute.utils import AuxData

    load("sm_90a", 128, "bfloat16", (128, 176), True)
    bshd = lambda: make_fake_tensor(
        BFloat16, (*(cute.sym_int32() for _ in range(3)), D), (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1),
        assumed_align=16,
    )  # fmt: skip
    lse = make_fake_tensor(
        Float32, tuple(cute.sym_int32() for _ in range(3)), (cute.sym_int64(), cute.sym_int64(), 1), assumed_align=4
    )
    kernel = lambda: FlashAttentionForwardSm90(
        BFloat16, D, D, 1, is_causal=False, is_local=False, pack_gqa=False, tile_m=128, tile_n=176, num_stages=2,
        num_threads=384, Q_in_regs=False, intra_wg_overlap=True, mma_pv_is_rs=True,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="aux_data"):
        upstream = compile_for(
            "sm_90a", kernel, *(bshd() for _ in range(4)), lse, Float32(1.0), *(None,) * 9, AuxData(), None, None
        )
    upstream.export_to_c(object_file_path=str(tmp_path / "upstream.o"), function_name="func")
    ours = sass("forward-sm_90a-d128-bfloat16", with_lse=True, tile=[128, 176])
    assert ours == instructions(tmp_path / "upstream.o")


@pytest.fixture
def arguments():
    return attention_views(P, ROWS, HEADS, D)


def test_call_reaches_the_launch(arguments, no_gpu):
    if not no_gpu:
        pytest.skip("the addresses are made up")
    with pytest.raises(RuntimeError, match="Cuda"):
        load(*CASES[0])(*arguments.values())


WRONG = {
    "extent": ("lse", lambda: device_view((P, HEADS, ROWS + 1), code=FLOAT, bits=32)),
    "heads": ("k", lambda: device_view((P, KEYS, HEADS + 1, D))),
    "head_dim": ("q", lambda: device_view((P, ROWS, HEADS, 64))),
    "dtype": ("o", lambda: device_view((P, ROWS, HEADS, D), code=FLOAT)),
    "alignment": ("o", lambda: device_view((P, ROWS, HEADS, D), address=(1 << 40) + 8)),
    "stride": ("o", lambda: device_view((P, ROWS, HEADS, D), (2**36, P * HEADS * D + 4, D, 1))),
    "missing": ("lse", lambda: None),
}


@pytest.mark.parametrize("what", WRONG)
def test_call_names_a_wrong_argument(what, arguments):
    name, make = WRONG[what]
    with pytest.raises((ValueError, TypeError), match=rf"{name}|argument #{list(arguments).index(name)}"):
        load(*CASES[0])(*{**arguments, name: make()}.values())


def test_tile_rows():
    assert forward_tile_rows(128, "sm_90a") == 128
    assert forward_tile_rows(64, "sm_90a") == 192
    assert forward_tile_rows(64, "sm_90a", (128, 128)) == 128
    assert forward_tile_rows(128, "sm_100a") == 256
    assert (128, 160) in FORWARD_TILES["sm_90a", 128]


def test_alike_tiles_have_the_same_keys():
    assert alike_tiles(64, "sm_90a") == ((192, 128), (128, 128))
    assert alike_tiles(128, "sm_90a") == ((128, 160),)
    assert alike_tiles(64, "sm_100a") == ((128, 128),)


def test_unknown_tile_arch_or_dtype_is_refused_before_compiling():
    with pytest.raises(ValueError, match="128x176"):
        load_forward(128, "bfloat16", "sm_90a", 132, (64, 64))
    with pytest.raises(ValueError, match="sm_80"):
        load_forward(128, "bfloat16", "sm_80", 108)
    with pytest.raises(ValueError, match="float32"):
        load_forward(128, "float32", "sm_90a", 132)
