"""Many calls with changing shapes, delays of the device and other traffic on the links; `fa-a2a soak` in short."""

import json

import pytest

from fa_a2a.bench import soak


def check(device, tmp_path, calls, longest_us, traffic):
    import torch.distributed as dist

    out = tmp_path / "soak.jsonl"
    soak.body(device, calls, longest_us, traffic, out)  # raises if anything was wrong on any rank
    if dist.get_rank() == 0:
        (line,) = [json.loads(text) for text in out.read_text().splitlines()]
        assert (line["calls"], line["epochs"], line["wrong"], line["wrong_traffic"]) == (calls, calls, 0, 0)
        assert line["symmetric_bytes_end"] == line["symmetric_bytes_start"]
        assert line["device_bytes_end"] <= line["device_bytes_start"] + (1 << 20)
        assert line["resident_bytes_end"] <= line["resident_bytes_start"] + (64 << 20)


@pytest.mark.parametrize(("longest_us", "traffic"), [(300.0, False), (0.0, True), (300.0, True)])
def test_a_thousand_calls(device, tmp_path, longest_us, traffic):
    check(device, tmp_path, 1000, longest_us, traffic)


@pytest.mark.slow
def test_twenty_thousand_calls_with_delays_and_traffic(device, tmp_path):
    check(device, tmp_path, 20_000, 100.0, True)
