"""A short calibration on the machine: the model's laws must hold there."""

import pytest
import torch
import torch.distributed as dist

from fa_a2a import config
from fa_a2a.bench import calibrate, publication
from fa_a2a.bench.record import read
from fa_a2a.xstage.fit import fit
from fa_a2a.xstage.samples import read_runs

pytestmark = pytest.mark.skipif(config.share_gpu(), reason="times mean nothing on GPUs that ranks share")


@pytest.fixture
def found(device, tmp_path):
    """The fit of one calibration, known to every rank: all fail together, or none waits for the others."""
    out = tmp_path / "calibrate.jsonl"
    calibrate.body(device, 3, True, out)
    box = [None]
    if dist.get_rank() == 0:
        (run,) = read_runs(read(out))
        try:
            box = [fit(run)]
        except Exception as error:
            box = [error]
    dist.broadcast_object_list(box)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def test_the_laws_hold(found):
    """Fence-free bursts overlap their gap with the drain; with a fence, and released together, they add up."""
    for name, store in found.stores.items():
        laws = (("max", store.max_law, 0.15), ("steady", store.steady_law, 0.1), ("coupled", store.coupled_law, 0.15))
        for law, points, limit in laws:
            assert points
            for p in points:
                assert abs(p.residual) < limit, f"{name} {law}: {p.measured_us:.2f} at {p.gap_us:.1f}, {p.predicted_us}"
        # by clocks in the kernel and around it
        for p in store.completed:
            assert abs(p.done_us - p.local_us - p.above_local_us) < 2, f"{name}: {p}"
        drain_us = store.max_law[0].predicted_us
        assert store.issue_us.value < 0.25 * drain_us
        assert store.capacity.low_bytes < 132 * 128 * 1024
        # both kinds of store drain through the same path
        assert store.rate_gb_s.value == pytest.approx(found.rate_gb_s.value, rel=0.1)
        stalled, paced = store.paced_us[1, 0.0], store.paced_us[16, 1.0]
        assert paced < 0.5 * stalled, f"{name}: pacing must take most of the stall away, {paced} of {stalled} us"


def test_publication_costs_microseconds(device, tmp_path):
    """Inside the kernel less than by a kernel behind it; attention runs at the speed of this GPU. Judged by rank 0."""
    out = tmp_path / "publication.jsonl"
    publication.body(device, 5, out)
    box = [None]
    if dist.get_rank() == 0:
        lines, sms = read(out), torch.cuda.get_device_properties(device).multi_processor_count
        own = publication.found(lines, lines[0]["device"], dist.get_world_size(), sms)
        good = 0 < own["publish_inside_us"] < own["publish_us"] < 30 and 300 < own["tflops"] < 1000
        box = [None if good else own]
    dist.broadcast_object_list(box)
    assert box[0] is None
