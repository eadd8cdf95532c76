"""The layer benchmark between CPU processes: its lines, what it checks, and what it leaves out."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fa_a2a
from fa_a2a.bench import layer
from fa_a2a.bench.layer_case import Layer, Way
from fa_a2a.bench.layer_methods import ways
from fa_a2a.bench.sweep import Case
from fa_a2a.comm.group import resolve
from fa_a2a.errors import FaA2AError


def case(**fields) -> Case:
    rest = {"batch": 1, "dtype": "float32", "kernel": "cpu", "rounds": 2, "profile": "none"}
    return Case(**{"seq_len": 96, "num_heads": 4, "head_dim": 32, **rest, **fields})


def bench(rank, size, out, methods, fields):
    fa_a2a.close()
    layer.body(torch.device("cpu"), [case(), case(**fields)], methods, Path(out))


def agrees(rank, size, name, fields):
    """Whether a method gives what the separate collectives give, twice in a row; and why it was left out."""
    made = Layer(case(**fields), resolve(None), torch.device("cpu"))
    found, skipped = ways(made, (name,))
    if name in found:
        for _ in range(2):
            made.check(name, found[name].call, found[name])
    fa_a2a.close()
    return skipped.get(name)


def wrong(rank, size, exact):
    """A method that swaps two tokens on rank 1 alone; returns what each rank is told."""
    made = Layer(case(), resolve(None), torch.device("cpu"))

    def call():
        out = made.want.clone()
        return out[:, [1, 0, *range(2, out.shape[1])]] if rank == 1 else out

    try:
        made.check("swapped", call, Way(call, "cpu", "", exact=exact))
    except FaA2AError as error:
        return str(error)
    finally:
        fa_a2a.close()


def test_lines(ranks, tmp_path):
    out = tmp_path / "layer.jsonl"
    ranks(2).run(bench, out=str(out), methods=("nccl_packed", "symm_mem"), fields={"seq_len": 64, "dtype": "bfloat16"})
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [x["method"] for x in lines] == 2 * ["fa_a2a", "nccl", "nccl_packed", "attention"]
    assert {(x["kind"], x["mode"], x["world_size"], x["device"]) for x in lines} == {("layer", "eager", 2, "CPU")}
    assert [x["bitwise_equal"] for x in lines[:4]] == [True, True, True, None]
    assert [x["transport"] for x in lines[:4]] == ["shared_memory", "gloo", "gloo", ""]
    for x in lines:
        q_k_v_o = 4 * x["tensor_bytes"]
        assert x["tensor_bytes"] == x["seq_len"] * 2 * 32 * (4 if x["dtype"] == "float32" else 2)
        if x["method"] == "fa_a2a":
            assert q_k_v_o < x["workspace_bytes"] < q_k_v_o + (1 << 16)
        assert x["ready_us"] > 0 and len(x["rounds_us"]) == 2
        assert x["host_us"] is None and "profile" not in x
    assert all(x["vs_attention"] == 1 for x in lines if x["method"] == "attention")
    assert len({x["date"] for x in lines[:4]}) == 1


def test_command(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "fa_a2a.cli", "sweep", "--device", "cpu", "--ranks", "2", "--rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "cute")])}
    command += ["--seq-lens", "64", "--layer", "nccl_packed"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    methods = [json.loads(x)["method"] for x in (tmp_path / "fa_a2a_results/layer.jsonl").read_text().splitlines()]
    assert methods == ["fa_a2a", "nccl", "nccl_packed", "attention"]
    assert "2 ranks on CPU" in done.stdout and "lines: fa_a2a_results/layer.jsonl" in done.stdout


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    "fields", [{"batch": 2, "num_heads": 8, "head_dim": 64}, {"seq_len": 40, "num_heads": 8, "dtype": "float16"}]
)
def test_packed_equals_separate_bitwise(ranks, size, fields):
    assert ranks(size).run(agrees, name="nccl_packed", fields=fields) == size * [None]


def test_diffusers_agrees_or_is_left_out_with_a_reason(ranks):
    reasons = ranks(2).run(agrees, name="diffusers", fields={"batch": 2})
    if importlib.util.find_spec("diffusers") is None:
        assert all("not installed" in reason for reason in reasons)
    else:
        assert reasons == [None, None]


def test_symmetric_memory_is_left_out_on_cpus(ranks):
    assert all("is for GPUs" in reason for reason in ranks(2).run(agrees, name="symm_mem", fields={}))


@pytest.mark.parametrize("exact", [True, False])
def test_a_wrong_result_on_one_rank_ends_the_run_on_all(ranks, exact):
    for text in ranks(2).run(wrong, exact=exact):
        assert "swapped at S=96" in text and "no time is reported" in text
