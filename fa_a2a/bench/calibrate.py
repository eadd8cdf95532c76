"""`fa-a2a calibrate` on GPUs: which bursts are run, and the lines they become. One line for each point.

The points are run round by round, so that a drift of the clocks falls on all of them; the first round is dropped.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from ..comm.group import resolve
from ..errors import ConfigurationError, FaA2AError
from ..xstage.samples import KIND
from . import publication
from .bursts import Bursts, Launch, Setting
from .launch import under_torchrun
from .record import append, environment

_KIB = 1024
TILE_BYTES = 32 * _KIB  # one attention tile: 128 rows of 128 bf16
GAPS_US = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 30.0)
QUICK_GAPS_US = (0.0, 4.0, 8.0, 12.0, 20.0, 30.0)
ISOLATED_BYTES = tuple(n * _KIB for n in (8, 12, 16, 24, 32, 48, 64, 96, 128))
RECOVERY_US = 150.0  # three times what the largest burst takes to drain
WAVE_GAP_US = 50.0
PACED = ((1, 0.0), (16, 0.0), (8, 2.0), (16, 1.0))  # (slices, pause in us); the last two take longer than V/R
# the lists of a point of released bursts; the first burst of a launch is cold and is left out
_RELEASED = {
    "isolated": ("slowest_us", "median_us"),
    "paced": ("slowest_us", "median_us"),
    "load": ("slowest_us", "median_us", "behind_slowest_us", "behind_median_us"),
    "fence_released": ("slowest_us", "done_us"),
}


def plan(num_sms: int, quick: bool = False) -> list[Setting]:
    """Every launch of a round. `quick` leaves out what the laws do not need."""
    from fa4_a2a.burst import STORES

    return [setting for store in STORES for setting in _of_store(store, num_sms, quick)]


def _of_store(store: str, num_sms: int, quick: bool) -> Iterator[Setting]:
    from fa4_a2a.burst import Flags

    each, gaps = int(Flags.RELEASE_EACH), QUICK_GAPS_US if quick else GAPS_US
    # (blocks, KiB each): several ways to the same volume, so that the volume can be seen to be what counts
    shares = [(num_sms, kib) for kib in (16, 32, 64, 128)]
    if not quick:
        shares += [(num_sms // 2, kib) for kib in (32, 64, 128)] + [(num_sms // 4, kib) for kib in (64, 128)]
    for traffic in ("all_to_all", "one_sender"):
        for ctas, kib in shares:
            for bursts in (40, 160):
                yield Setting("zero_gap", store, traffic, ctas, kib * _KIB, bursts, 0.0)
    for gap_us in gaps:
        for bursts in (40, 160):
            for traffic in ("all_to_all", "local"):
                yield Setting("gap", store, traffic, num_sms, TILE_BYTES, bursts, gap_us)
            yield Setting("fence", store, "all_to_all", num_sms, TILE_BYTES, bursts, gap_us, flags=int(Flags.FENCE))
        for traffic in ("all_to_all", "local"):
            together = each | int(Flags.FENCE)
            yield Setting("fence_released", store, traffic, num_sms, TILE_BYTES, 13, gap_us, flags=together)
    for traffic in ("all_to_all", "one_sender", "local"):
        for nbytes in ISOLATED_BYTES:
            yield Setting("isolated", store, traffic, num_sms, nbytes, 13, RECOVERY_US, flags=each)
    for traffic in ("all_to_all", "local"):
        tile = (store, traffic, num_sms, TILE_BYTES)
        for slices, pace_us in (PACED[0], PACED[-1]):
            yield Setting("load", *tile, 13, RECOVERY_US, slices, pace_us, each | int(Flags.LOAD))
        for slices, pace_us in PACED:
            yield Setting("paced", *tile, 13, RECOVERY_US, slices, pace_us, each)
        for bursts in (1, 3):
            first = int(Flags.RELEASE_FIRST)
            yield Setting("waves", *tile, bursts, WAVE_GAP_US, flags=first, repeats=4)


def rank_count(asked: int | None) -> int:
    """How many ranks take part. ConfigurationError below two: the path under test lies between GPUs."""
    ranks = asked if asked is not None else torch.cuda.device_count()
    if asked is None and under_torchrun():
        ranks = int(os.environ["WORLD_SIZE"])
    if ranks < 2:
        raise ConfigurationError(
            f"a calibration needs two GPUs or more, got {ranks}; give --samples to fit recorded ones"
        )
    return ranks


def whole(device: torch.device, rounds: int, quick: bool, out: Path) -> None:
    """What each rank of the command runs: the bursts, whose lines are then on file, and attention with publication."""
    body(device, rounds, quick, out)
    publication.body(device, rounds, out)


def body(device: torch.device, rounds: int, quick: bool, out: Path) -> None:
    """What each rank runs. Rank 0 shows the progress and appends the lines."""
    group = resolve(None)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    # taken once: the lines of a run are known by their date
    common = {**environment(KIND, device, group.size), "num_sms": num_sms}
    settings = plan(num_sms, quick)
    bursts = Bursts(group, device, num_sms)
    _check_landing(bursts, settings)
    found: dict[Setting, list[list[Launch]]] = defaultdict(list)
    steps = (rounds + 1) * len(settings)
    with tqdm(total=steps, disable=group.rank != 0, leave=False, unit="point", file=sys.stderr) as bar:
        for index in range(rounds + 1):
            for setting in settings:
                bar.set_description(f"{setting.experiment} {setting.store}", refresh=False)
                launches = [bursts.launch(setting) for _ in range(setting.repeats)]
                if index:
                    found[setting].append([launch for launch in launches if launch is not None])
                bar.update()
    bursts.close()  # not after an error: freeing is collective, and a rank may be gone
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, [found[setting] for setting in settings])
    if group.rank == 0:
        append(out, [common | line(s, [rank[i] for rank in everyone]) for i, s in enumerate(settings)])


def _check_landing(bursts: Bursts, settings: list[Setting]) -> None:
    """FaA2AError on every rank if the stores of one went astray."""
    for store in sorted({setting.store for setting in settings}):
        first = next(s for s in settings if s.store == store and s.traffic == "all_to_all")
        verdict: list[Any] = [None] * bursts.group.size
        dist.all_gather_object(verdict, bursts.landed(first))
        if not all(verdict):
            missing = [rank for rank, landed in enumerate(verdict) if not landed]
            raise FaA2AError(f"stores of kind {store!r} did not arrive in the memory of ranks {missing}; a bug")


def line(setting: Setting, ranks: list[list[list[Launch]]]) -> dict[str, Any]:
    """The point's fields of a calibrate line, from each rank's launches by round; xstage.samples explains them."""
    ranks = [rank for rank in ranks if any(rank)]  # those that sent
    rounds = [[launch for rank in ranks for launch in rank[i]] for i in range(len(ranks[0]))]
    every = [launch for launches in rounds for launch in launches]
    point = {
        name: getattr(setting, name)
        for name in ("experiment", "store", "traffic", "num_ctas", "bytes_per_cta", "bursts", "gap_us", "slices")
    }
    point |= {
        "pace_us": setting.pace_us,
        "total_us": _rounded(max(x.total_us for x in launches) for launches in rounds),
        "gap_measured_us": _rounded(_mean([x.gap_us for x in launches]) for launches in rounds),
        "issue_us": _rounded(_mean([x.issue_us for x in launches]) for launches in rounds),
    }
    if setting.experiment == "waves":
        point["slowest_us"] = _rounded(x.block_us for x in every)
    if setting.experiment in ("gap", "fence"):
        point["steady_us"] = _rounded(max(x.steady_us for x in launches) for launches in rounds)
    for name in _RELEASED.get(setting.experiment, ()):
        point[name] = _rounded(value for x in every for value in getattr(x, name)[1:])
    return point


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _rounded(values: Any) -> list[float]:
    """To ns."""
    return [round(value, 3) for value in values]
