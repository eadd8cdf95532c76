"""Calibrate lines made from the model, with noise: what a machine that obeys it exactly would have recorded."""

import random

from fa_a2a.xstage import burst_gap as bg

MIB = 1024**2
SMS = 132
KIB = 1024
TILE = 32 * KIB
GAPS = (0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 30)
RATE, ONE_SENDER = 354.0, 372.0
FLOORS = {"st": 0.56, "bulk": 0.75}
CAPACITIES = {"st": 1.5 * MIB, "bulk": 0.6 * MIB}
BARRIER, LOCAL_DONE = 5.0, 1.2
DRIFT, BLOCKED = {"st": 2.2, "bulk": 3.0}, {"st": 0.7, "bulk": 5.1}


def make(seed=0, noise=0.01, rounds=7, date="2026-01-01T00:00:00Z", capacities=CAPACITIES, rate=RATE):
    draw = random.Random(seed)
    common = {
        "kind": "calibrate",
        "device": "NVIDIA H200",
        "world_size": 4,
        "num_sms": SMS,
        "date": date,
        "git": "",
        "content_hash": "",
        "versions": {"torch": "2.11.0"},
    }
    lines = []

    def jitter(value):
        return value * (1 + noise * draw.uniform(-1, 1))

    def add(experiment, store, traffic, bursts, gap, period, ctas=SMS, size=TILE, slices=1, pace=0.0, **lists):
        overhead = 0.05 if gap == 0 else 0.0  # the loop's own, which the gap as measured holds
        totals = [6.0 + bursts * jitter(period + overhead) for _ in range(rounds)]
        lines.append(
            common
            | {"experiment": experiment, "store": store, "traffic": traffic, "num_ctas": ctas, "bytes_per_cta": size}
            | {"bursts": bursts, "gap_us": float(gap), "slices": slices, "pace_us": pace, "total_us": totals}
            | {
                "gap_measured_us": [gap + overhead] * rounds,
                "issue_us": [max(0.0, jitter(period - gap)) for _ in range(rounds)],
            }
            | lists
        )

    for store, floor in FLOORS.items():
        for bursts in (40, 160):
            for traffic, speed in (("all_to_all", rate), ("one_sender", ONE_SENDER)):
                for ctas, size in ((SMS, 16 * KIB), (SMS, TILE), (SMS, 128 * KIB), (SMS // 2, 64 * KIB)):
                    drain = ctas * size / speed / 1e3
                    add("zero_gap", store, traffic, bursts, 0, drain - 0.05, ctas, size)
            for gap in GAPS:
                law = {"volume_bytes": SMS * TILE, "rate_gb_s": rate, "gap_us": gap}
                period = bg.period_us(**law, floor_us=floor)
                add("gap", store, "all_to_all", bursts, gap, period, steady_us=[period] * rounds)
                add("gap", store, "local", bursts, gap, floor * 0.8 + gap, steady_us=[floor * 0.8 + gap] * rounds)
                spread = gap + SMS * TILE / rate / 1e3 / (1 + gap / 20)  # blocks on their own: out of step
                add("fence", store, "all_to_all", bursts, gap, spread)
        for size in (n * KIB for n in (8, 16, 32, 64, 128)):
            local = floor * size / TILE * 0.8
            q = capacities[store]
            issue = bg.isolated_issue_us(
                volume_bytes=SMS * size, rate_gb_s=rate, floor_us=floor * size / TILE, capacity_bytes=q
            )
            for traffic, value in (("all_to_all", issue), ("local", local)):
                slowest = [jitter(value) for _ in range(24)]
                add("isolated", store, traffic, 13, 150, value + 150, size=size, slowest_us=slowest, median_us=slowest)
        for traffic in ("all_to_all", "local"):
            remote = traffic == "all_to_all"
            waits = [jitter(1.0 + BLOCKED[store] * remote) for _ in range(24)]
            add("load", store, traffic, 13, 150, 151, slowest_us=waits, behind_slowest_us=waits, behind_median_us=waits)
            for slices, pace, stall in ((1, 0.0, 8.0), (16, 1.0, 0.4)):
                paced = [jitter(0.7 + stall * remote) for _ in range(24)]
                add("paced", store, traffic, 13, 150, 151, slices=slices, pace=pace, slowest_us=paced)
            for bursts in (1, 3):
                waves = [jitter(bursts * 0.7 + remote * (8 + (bursts - 1) * DRIFT[store])) for _ in range(24)]
                add("waves", store, traffic, bursts, 50, 58, slowest_us=waves)
    for store in FLOORS:
        for gap in GAPS:
            for traffic, done in (("all_to_all", SMS * TILE / rate / 1e3), ("local", LOCAL_DONE)):
                waves = [jitter(done) for _ in range(24)]
                add("fence_released", store, traffic, 13, gap, gap + BARRIER + done, slowest_us=waves, done_us=waves)
    return lines
