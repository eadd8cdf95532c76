"""Which ranks: sub-groups, meshes, two groups at once, one rank, and what is no group."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from workers import attempt, coded, inputs, reference, shard, works

import fa_a2a
from fa_a2a import UlyssesAttention
from fa_a2a.comm.group import resolve

_made = {}


def made(key, make):
    """Process groups are kept for the life of the pool: each one costs sockets and store keys."""
    return _made.setdefault(key, None) or _made.update({key: make()}) or _made[key]


def two_groups(rank, size):
    pairs = made("pairs", lambda: [dist.new_group([0, 1]), dist.new_group([2, 3])])
    group, me = pairs[rank // 2], rank % 2
    layer = UlyssesAttention(group, kernel="cpu", exchange="fused", copy=True)
    for call in range(20):
        whole = coded(1, 12 + 2 * (rank // 2), 4, 16, torch.float32, seed=100 * (rank // 2) + call)
        out = layer(*(shard(t, me, 2) for t in whole))
        assert (out.double() - shard(reference(*whole), me, 2)).abs().max() < 1e-5
    workspace = resolve(group).workspace
    held = fa_a2a.memory_bytes()[resolve(group).name]
    distinct = workspace is not resolve(None).workspace
    fa_a2a.close(group)
    return distinct, held > 0, resolve(group).name in fa_a2a.memory_bytes()


def test_case_07_two_groups(ranks):
    assert ranks(4).run(two_groups) == [(True, True, False)] * 4


def three_of_four(rank, size):
    group = made("three", lambda: dist.new_group([0, 1, 2]))
    if rank == 3:
        return attempt(UlyssesAttention(group), *inputs(rank, size))
    assert works(rank, 3, group)
    assert works(rank, 3, resolve(group).name)  # a group's name stands for it
    workspace = resolve(group).workspace
    fa_a2a.close(group)
    return workspace.owners


def test_sub_group_of_three_of_four_ranks(ranks):
    *inside, outside = ranks(4).run(three_of_four)
    assert inside == [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    assert outside.error == "GroupError"
    assert "of which this rank is a member" in outside.text


def ranks_in_another_order(rank, size):
    """Group ranks follow the sorted global ranks; {3, 1} is group rank 0 -> 1, 1 -> 3."""
    group = made("odd", lambda: dist.new_group([1, 3]))
    if rank in (1, 3):
        well = works(rank // 2, 2, group)
        fa_a2a.close(group)
        return well
    return True


def test_sub_group_that_leaves_gaps(ranks):
    assert all(ranks(4).run(ranks_in_another_order))


def overlapping(rank, size):
    whole, first = dist.group.WORLD, made("three", lambda: dist.new_group([0, 1, 2]))
    well = [works(rank, size, whole)]
    for _ in range(3):
        if rank < 3:
            well.append(works(rank, 3, first))
        well.append(works(rank, size, whole))
    if rank < 3:
        fa_a2a.close(first)
    return all(well)


def test_overlapping_groups_in_turn(ranks):
    assert all(ranks(4).run(overlapping))


def mesh_axes(rank, size):
    mesh = made("mesh", lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp")))
    whole = attempt(UlyssesAttention(mesh), *inputs(rank, size))
    well = works(rank % 2, 2, mesh["sp"]) and works(rank // 2, 2, mesh["dp"])
    same = resolve(mesh["sp"]) is resolve(mesh.get_group("sp"))
    fa_a2a.close(mesh["sp"])
    fa_a2a.close(mesh["dp"])
    return whole, well, same


def test_mesh_axis_is_a_group_and_a_whole_mesh_is_refused(ranks):
    for whole, well, same in ranks(4).run(mesh_axes):
        assert whole.error == "GroupError"
        assert "must have one dimension, got 2" in whole.text
        assert "mesh['name']" in whole.text
        assert well
        assert same


def alone(rank, size):
    groups = made("alone", lambda: [dist.new_group([r]) for r in range(size)])
    whole = coded(2, 9, 3, 16, torch.bfloat16)
    out = UlyssesAttention(groups[rank], kernel="cpu", exchange="fused")(*whole)
    return (out.double() - reference(*whole)).abs().max().item()


def test_group_of_one_rank(ranks):
    assert max(ranks(2).run(alone)) < 0.02


def error_in_one_group_only(rank, size):
    """A group's error is its own: the other pair, and the whole world, go on."""
    assert works(rank, size)
    pairs = made("pairs", lambda: [dist.new_group([0, 1]), dist.new_group([2, 3])])
    group, me = pairs[rank // 2], rank % 2
    assert works(me, 2, group)
    rows = 5 if rank == 1 else 4
    outcome = attempt(UlyssesAttention(group, kernel="cpu", exchange="fused"), *inputs(me, 2, rows=rows))
    world = works(rank, size)
    fa_a2a.close(group)
    return outcome.error, world, works(me, 2, group)


def test_error_in_one_group_leaves_the_others_alone(ranks):
    results = ranks(4).run(error_in_one_group_only)
    assert [r[0] for r in results] == ["PeerMismatchError", "PeerMismatchError", "", ""]
    assert all(world and well for _, world, well in results)


def built_early(rank, size):
    """The process group is taken away and made anew; a module built in between works afterwards."""
    import torch.distributed.distributed_c10d as c10d

    fa_a2a.close()
    address = c10d._get_default_store()
    dist.destroy_process_group()
    layer = UlyssesAttention(kernel="cpu", exchange="fused", copy=True)
    early = attempt(layer, *inputs(rank, size))
    dist.init_process_group("gloo", store=dist.PrefixStore("second", address), rank=rank, world_size=size)
    whole = coded(1, 8 * size, 2 * size, 16, torch.float32)
    out = layer(*(shard(t, rank, size) for t in whole))
    error = (out.double() - shard(reference(*whole), rank, size)).abs().max().item()
    return early, error, works(rank, size)


def test_case_15_module_built_before_the_process_group(fresh_ranks):
    for early, error, well in fresh_ranks(2).run(built_early):
        assert early.error == "GroupError"
        assert "torch.distributed.init_process_group() first" in early.text
        assert error < 1e-5
        assert well


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_group_that_is_already_known_is_found_again(ranks, size):
    assert all(ranks(size).run(found_again))


def found_again(rank, size):
    return resolve(None) is resolve(dist.group.WORLD) is resolve(dist.group.WORLD.group_name)
