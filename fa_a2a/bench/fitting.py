"""From calibrate lines to a profile, a report and a plot. Needs no GPU."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, FaA2AError, ProfileError, UnsupportedError
from ..xstage import PlatformProfile, available_profiles, load_profile, save_profile
from ..xstage.curves import remote_minus_local, slowest
from ..xstage.fit import Calibration, fit
from ..xstage.platform import AttentionSpeed
from ..xstage.samples import KIND, Run, read_runs
from . import publication
from .record import read


def base_profile(run: Run, base: str | None) -> PlatformProfile | None:
    """The profile whose attention speed is taken over: the named one, or a shipped one of this device.

    ProfileError where the named one is of another device.
    """
    if base is not None:
        chosen = load_profile(base)
        chosen.check_fits(num_ranks=chosen.num_ranks, device=run.device)
        return chosen
    shipped = [load_profile(name) for name in available_profiles()]
    fitting = [p for p in shipped if p.device.casefold() == run.device.strip().casefold()]
    fitting.sort(key=lambda p: p.num_ranks != run.num_ranks)
    return fitting[0] if fitting else None


def profile_of(
    found: Calibration,
    *,
    name: str | None = None,
    base: str | None = None,
    attention_tflops: float | None = None,
    measured: Mapping[str, float] | None = None,
) -> PlatformProfile:
    """The profile of a calibration. Its samples are of stores alone: attention's speed and the times of publication are
    `measured` (publication.found), or taken over, and `source` says from where."""
    run, own = found.run, dict(measured or {})
    taken = base_profile(run, base)
    source = "fa-a2a calibrate"
    if attention_tflops is None and base is None and "tflops" in own:
        attention = AttentionSpeed(tflops=own["tflops"])
    elif attention_tflops is not None:
        attention = AttentionSpeed(tflops=attention_tflops)
        source += "; attention's speed as given"
    elif taken is not None:
        attention = taken.attention
        source += f"; attention's speed from {taken.name}"
    else:
        raise ProfileError(
            f"a profile needs attention's speed, which the samples do not hold; got none, and no profile of "
            f"{run.device!r} is known; give --attention-tflops or --base"
        )
    times: dict[str, float | None] = {"publish_us": None, "publish_inside_us": None}
    for field in times:
        if field in own:
            times[field] = own[field]
        elif taken is not None and taken.num_ranks == run.num_ranks and (value := getattr(taken, field)) is not None:
            times[field] = value
            source += f"; {field} from {taken.name}"
    return found.profile(name=name or slug(run), attention=attention, source=source, **times)


def slug(run: Run) -> str:
    """ "NVIDIA H200" and 4 ranks -> "h200x4"."""
    words = re.sub(r"[^a-z0-9]+", "-", run.device.lower().replace("nvidia", "")).strip("-")
    return f"{words or 'gpu'}x{run.num_ranks}"


def explain(found: Calibration) -> str:
    """The numbers, and how well the laws hold, as a person reads them."""
    run = found.run
    lines = [
        f"{run.device} x {run.num_ranks}, {run.num_sms} SMs, {run.date}: R {found.rate_gb_s} GB/s, all ranks sending"
    ]
    if found.one_sender_gb_s is not None:
        lines.append(f"  one rank sending: {found.one_sender_gb_s} GB/s")
    for name, store in found.stores.items():
        lines.append(f"  {name}: R {store.rate_gb_s} GB/s, T0 {store.issue_us} us, Q {store.capacity}")
        laws = (
            ("max(T0 + G, V/R), whole launches", store.max_law),
            ("max(T0 + G, V/R), while all blocks run", store.steady_law),
            ("G + V/R, with a fence, bursts released together", store.coupled_law),
            ("G + V/R, with a fence, blocks on their own", store.free_law),
        )
        for law, points in laws:
            if points:
                worst = max(points, key=lambda point: abs(point.residual))
                mean = statistics.mean(abs(point.residual) for point in points)
                lines.append(
                    f"    period against {law}: {worst.residual:+.1%} at worst (gap {worst.gap_us:.1f} us), "
                    f"{mean:.1%} on average"
                )
        if store.completed:
            done, local, above = (
                statistics.mean(getattr(p, name) for p in store.completed)
                for name in ("done_us", "local_us", "above_local_us")
            )
            lines.append(
                f"    released burst and fence, slowest block: {done:.2f} us, local control {local:.2f}; "
                f"whole launches: {above:.2f} above the local control"
            )
        bursts = (f"{p.volume_bytes / run.num_sms / 1024:g} KiB {p.issue_us.value:.2f}" for p in store.isolated)
        lines.append(f"    isolated, slowest block, us: {', '.join(bursts)}")
        lines.append(f"    local control:               {', '.join(f'{p.local_us:.2f}' for p in store.isolated)}")
        extras = [("a later full wave", store.drift_us), ("a load behind a blocked store", store.blocked_load_us)]
        loads = run.select("load", store=name, slices=1)
        if loads and all(sample.behind_median_us for sample in loads):
            median_us = remote_minus_local(run, lambda s: slowest(s, "behind_median_us"), "load", store=name, slices=1)
            extras.append(("the same, median block", median_us))
        extras += [(f"{n} slices {pace:g} us apart", us) for (n, pace), us in sorted(store.paced_us.items())]
        text = ", ".join(f"{what} {value:+.2f}" for what, value in extras if value is not None)
        if text:
            lines.append(f"    us above the local control: {text}")
    return "\n".join(lines)


def like_the_last(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the last run's machine and ranks: a file that is added to may hold runs of others before."""
    mine = [line for line in lines if line.get("kind") == KIND]
    last = mine[-1] if mine else {}

    def like(line: dict[str, Any]) -> bool:
        keys = ("device", "world_size", *(("num_sms",) if line.get("kind") == KIND else ()))
        return all(line.get(key) == last.get(key) for key in keys)

    return [line for line in lines if like(line)]


def report(options: argparse.Namespace) -> None:
    """Fits every run recorded in the files, prints each, writes the newest as the profile, and plots it."""
    tflops = options.attention_tflops
    if tflops is not None and not 0 < tflops < float("inf"):
        raise ConfigurationError(f"--attention-tflops must be positive, got {tflops}; leave it out for --base")
    lines = [line for path in options.samples or [options.out] for line in read(path)]
    if not options.samples:
        lines = like_the_last(lines)
    found = [fit(run) for run in read_runs(lines)]
    for one in found:
        print(explain(one))
    if len(found) > 1:
        rates = [one.rate_gb_s.value for one in found]
        apart = max(rates) / min(rates) - 1
        print(f"R of {len(rates)} runs: {min(rates):.1f} to {max(rates):.1f} GB/s, {apart:.1%} apart")
    run = found[-1].run
    own = publication.found(lines, run.device, run.num_ranks, run.num_sms)
    if own:
        print(
            f"  attention {own['tflops']:.0f} TFLOP/s; publication {own['publish_inside_us']:.2f} us inside the kernel,"
            f" {own['publish_us']:.2f} us by one behind it"
        )
    profile = profile_of(found[-1], name=options.name, base=options.base, attention_tflops=tflops, measured=own)
    path = options.profile_out or Path("fa_a2a_results") / f"{profile.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(profile, path)
    print(f"profile: {path}  ({profile.source})")
    try:
        from ..plot import calibration

        target = options.plot or path.with_suffix(".png")
        calibration(lines, target)
        print(f"plot: {target}")
    except UnsupportedError as error:
        print(f"no plot: {error}")
    except FaA2AError as error:
        print(f"no plot: {error}", file=sys.stderr)
