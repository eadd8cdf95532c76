"""Padded text in diffusers models: key lengths on the fused path, and what happens where it cannot be that."""

import copy
import warnings

import pytest
import torch

pytest.importorskip("diffusers")
from diffusion_models import TEXT, build, clean, draw, forward, lengths, parallel, twin
from test_diffusers import TOLERANCE, WRONG
from workers import attempt

import fa_a2a
from fa_a2a.comm.group import resolve
from fa_a2a.integrations import diffusers as fa
from fa_a2a.integrations import host_reads
from fa_a2a.integrations.diffusers import backend
from fa_a2a.ops import fused


def plans():
    """The last plan under each parallel config, and whether masked attention was spoken of."""
    return [route.attention.last_plan for route in backend._routes.values()], backend._MASKED in backend._told


def padded(rank, size, name, wrong=None):
    """(largest difference to the single process, exchange, key lengths, text rows, whether collectives were named)."""
    backend._told.discard(backend._MASKED)
    model, inputs = build(name)
    want = forward(model, inputs)
    right, other = fused.peer_sink, None
    try:
        if wrong:
            WRONG[wrong]()
        other = parallel(model, size, timeout_s=20)
        got = [forward(other, inputs) for _ in range(2)]
        found, masked = plans()
    finally:
        fused.peer_sink = right
        clean(other)
    (plan,) = filter(None, found) if any(found) else [None]
    taken = plan and (plan.exchange, plan.request.key_lengths, plan.request.replicated_text)
    return max((x - want).abs().max().item() for x in got), taken, masked


IMAGE = {"qwen_padded": 24, "hunyuan_video": 32}
TAKEN = {
    "qwen_padded": ("fused", (IMAGE["qwen_padded"] + TEXT - 5, IMAGE["qwen_padded"] + 7), -TEXT),
    "qwen_unpadded": ("fused", None, 0),
    "hunyuan_video": ("fused", (IMAGE["hunyuan_video"] + TEXT - 3, IMAGE["hunyuan_video"] + 5), -TEXT),
    "z_image": ("fused", (96, 128), 0),
    "qwen_odd": ("fused", (IMAGE["qwen_padded"] + TEXT - 1,), 1 - TEXT),
    "qwen_odd_mask": ("fused", (IMAGE["qwen_padded"] + TEXT - 1,) * 2, 1 - TEXT),
    "hunyuan_odd": ("fused", (IMAGE["hunyuan_video"] + TEXT - 1,) * 2, 1 - TEXT),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", TAKEN)
def test_padding_takes_the_fused_path(ranks, name, size):
    for difference, taken, masked in ranks(size).run(padded, name=name):
        assert difference < TOLERANCE
        assert (taken, masked) == (TAKEN[name], False)


def test_a_mask_with_gaps_takes_collectives(ranks):
    for difference, taken, masked in ranks(2).run(padded, name="qwen_masked"):
        assert difference < TOLERANCE
        assert (taken, masked) == (None, True)


@pytest.mark.parametrize(("name", "wrong"), [("qwen_padded", "heads"), ("hunyuan_video", "owners")])
def test_a_wrong_exchange_is_seen(ranks, name, wrong):
    assert min(result[0] for result in ranks(2).run(padded, name=name, wrong=wrong)) > 100 * TOLERANCE


def masks_in_turn(rank, size):
    """One model, masks that change from forward to forward, by other tensors and in place."""
    model, inputs = build("qwen_padded")
    other = parallel(model, size, timeout_s=20)
    gaps = lengths(TEXT - 5, 7)
    gaps[0, 2] = False
    kept, reads, read = lengths(TEXT, 3), [], host_reads._read
    host_reads._read = lambda mask: reads.append(1) or read(mask)
    differences = []
    try:
        for mask in (lengths(9, 4), None, gaps, kept, kept, kept, lengths(TEXT, TEXT).long(), lengths(1, TEXT).float()):
            given = inputs | {"encoder_hidden_states_mask": mask}
            differences.append((forward(other, given) - forward(model, given)).abs().max().item())
        count = len(reads)
        kept[:, 3:5] = True
        given = inputs | {"encoder_hidden_states_mask": kept}
        differences.append((forward(other, given) - forward(model, given)).abs().max().item())
    finally:
        host_reads._read = read
        clean(other)
    return max(differences), count, len(reads)


def test_masks_that_change_from_forward_to_forward(ranks):
    for difference, before, after in ranks(2).run(masks_in_turn):
        assert difference < TOLERANCE
        assert (before, after) == (5, 6)  # each mask once, however often it comes, and anew when it was written to


def odd_text(rank, size):
    """Rows of text that do not divide over the ranks: whole on each, but refused where a mask over them has gaps."""
    model, inputs = build("qwen_padded")
    rows = TEXT - 1
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, :rows]
    other = parallel(model, size, timeout_s=20)
    try:
        inputs["encoder_hidden_states_mask"] = lengths(9, 4)[:, :rows]
        difference = (forward(other, inputs) - forward(model, inputs)).abs().max().item()
        inputs["encoder_hidden_states_mask"] = lengths(9, 4)[:, :rows].logical_not()
        return difference, attempt(forward, other, inputs)
    finally:
        clean(other)


def test_text_that_does_not_divide(ranks):
    for difference, outcome in ranks(2).run(odd_text):
        assert difference < TOLERANCE
        assert outcome.error == "ConfigurationError" and "got 15 rows over 2" in outcome.text


def uneven_shards(rank, size):
    """Text of 15 rows over two ranks in the way that diffusers has for shards that are not equal."""
    from diffusers import ContextParallelConfig

    model, inputs = build("qwen_padded")
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, : TEXT - 1]
    inputs["encoder_hidden_states_mask"] = None
    other = twin(model)
    fa.enable()
    other.set_attention_backend("fa_a2a")
    fa.parallelize(other, ContextParallelConfig(ulysses_degree=size, ulysses_anything=True))
    try:
        return (forward(other, inputs) - forward(model, inputs)).abs().max().item()
    finally:
        clean(other)


def test_shards_that_are_not_equal_stay_diffusers_own(ranks):
    assert max(ranks(2).run(uneven_shards)) < TOLERANCE


def other_mask_on_one_rank(rank, size):
    model, inputs = build("qwen_padded")
    other = parallel(model, size, timeout_s=20)
    try:
        return attempt(forward, other, inputs | {"encoder_hidden_states_mask": lengths(9, 4 + rank)})
    finally:
        clean(other)


def test_another_mask_on_one_rank(ranks):
    for outcome in ranks(2).run(other_mask_on_one_rank):
        assert outcome.error == "PeerMismatchError" and "key_lengths" in outcome.text and outcome.seconds < 15


GAPS = lengths(TEXT - 5, 7)
GAPS[0, 2] = False


def other_kinds_of_mask(rank, size, known):
    """A mask with gaps, for collectives, where the other rank's is padding, for the fused path; known: each was met."""
    model, inputs = build("qwen_padded")
    other = parallel(model, size, timeout_s=20)
    masks = [inputs | {"encoder_hidden_states_mask": mask} for mask in (GAPS, lengths(9, 4))]
    try:
        for given in masks if known else ():
            forward(other, given)
        outcome = attempt(forward, other, masks[rank])
        fa_a2a.close()
        return outcome, max((forward(other, given) - forward(model, given)).abs().max().item() for given in masks)
    finally:
        clean(other)


@pytest.mark.parametrize("known", [False, True])
def test_a_mask_with_gaps_on_one_rank(ranks, known):
    for outcome, difference in ranks(2).run(other_kinds_of_mask, known=known):
        assert outcome.error == "PeerMismatchError" and outcome.seconds < 5
        assert difference < TOLERANCE


def misfit(rank, size, name, argument):
    """Masks that the model itself refuses, and how it and its parallel twin end."""
    model, inputs = build(name)
    other, found = parallel(model, size, timeout_s=20), []
    try:
        for mask in (lengths(9, 4)[:, :-4], lengths(9), lengths(9, 4)[:, None]):
            with pytest.raises((ValueError, RuntimeError)) as alone:
                forward(model, inputs | {argument: mask})
            with pytest.raises((ValueError, RuntimeError)) as here:
                forward(other, inputs | {argument: mask})
            found.append((type(here.value), type(alone.value)))
        return found
    finally:
        clean(other)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("qwen_padded", "encoder_hidden_states_mask"), ("hunyuan_video", "encoder_attention_mask")],
)
def test_a_mask_that_does_not_fit_the_text_is_the_models_to_refuse(ranks, name, argument):
    for found in ranks(2).run(misfit, name=name, argument=argument):
        assert all(here is alone for here, alone in found)


def copied(rank, size, name):
    model, inputs = build(name)
    other = parallel(model, size, timeout_s=20)
    try:
        deep, shallow = copy.deepcopy(other), copy.copy(other)
        difference = (forward(shallow, inputs) - forward(model, inputs)).abs().max().item()
        return attempt(forward, deep, inputs), difference
    finally:
        clean(other)


@pytest.mark.parametrize("name", ["hunyuan_video", "flux"])
def test_a_deep_copy_of_a_parallel_model_is_refused(ranks, name):
    """Its hooks would run the original's blocks, with the key lengths of the original's last forward."""
    for outcome, difference in ranks(2).run(copied, name=name):
        assert outcome.error == "ConfigurationError" and "copy the model first" in outcome.text
        assert difference < TOLERANCE


def compiled(rank, size, name):
    torch._dynamo.reset()
    warnings.simplefilter("ignore")
    model, inputs = build(name)
    other = parallel(model, size)
    forward(other, inputs)  # diffusers' hooks read a signature in their first call, which Dynamo cannot trace
    other.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    try:
        found = []
        for mask in (lengths(9, 4), lengths(12, TEXT), None):
            given = inputs | {"encoder_hidden_states_mask": mask}
            found.append((forward(other, given) - forward(model, given)).abs().max().item())
        images = IMAGE[name]
        taken = {plan.request.key_lengths: plan.exchange for plan in resolve(None).plans.values()}
        return max(found), [taken.get((images + a, images + b)) for a, b in ((9, 4), (12, TEXT))]
    finally:
        clean(other)
        torch._dynamo.reset()


def test_compiled_blocks(ranks):
    for difference, exchanges in ranks(2).run(compiled, name="qwen_padded", timeout_s=200):
        assert difference < TOLERANCE and exchanges == ["fused", "fused"]


def grouped(rank, size):
    """enable_gqa through the dispatcher, also with fewer key heads than ranks."""
    from test_diffusers_calls import dispatch, parallel_config, sdpa, shard

    fa.enable()
    found = []
    try:
        for heads, few in ((4, 2), (8, 4), (4, 1)):
            q, *kv = draw(2, 32, heads, 16), draw(2, 32, few, 16, seed=1), draw(2, 32, few, 16, seed=2)
            config = parallel_config(size)
            with torch.no_grad():
                got = dispatch(*(shard(x, rank, size) for x in (q, *kv)), config, enable_gqa=True)
            want = shard(sdpa(q, *kv, enable_gqa=True), rank, size)
            found.append(((got - want).abs().max().item(), plans()[0][-1].exchange))
        return found
    finally:
        clean()


@pytest.mark.parametrize("size", [2, 4])
def test_grouped_queries_take_the_fused_path(ranks, size):
    for found in ranks(size).run(grouped):
        assert all(difference < TOLERANCE and exchange == "fused" for difference, exchange in found)
