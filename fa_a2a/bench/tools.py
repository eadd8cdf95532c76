"""What `fa-a2a plot` and `fa-a2a compile` do."""

from __future__ import annotations

import argparse
import time

from ..errors import ConfigurationError, UnsupportedError
from ..native import build as native
from . import checks


def plot(arguments: argparse.Namespace) -> int:
    from .. import plot
    from .readme import fill
    from .record import read

    for path in arguments.results:
        checks.readable(path, "results file")
    plot.check(arguments.out, "--out")
    lines = [line for path in arguments.results for line in read(path)]
    text = None
    if arguments.readme is not None:
        checks.readable(arguments.readme, "README")
        checks.writable(arguments.readme, "--readme")
        try:
            text = fill(arguments.readme.read_text(), lines)
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"a README is text, and {arguments.readme} is not") from error
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(
                f"the lines lack what the README's tables show ({error}); measure again"
            ) from error
    for path in plot.draw(lines, arguments.out):
        print(path)
    if text is not None:
        arguments.readme.write_text(text)
        print(arguments.readme)
    return 0


def build(arguments: argparse.Namespace) -> int:
    import torch

    arch, num_sms = arguments.arch, arguments.num_sms
    if num_sms is not None and num_sms < 1:
        raise ConfigurationError(f"--num-sms must be at least 1, got {num_sms}")
    if arch is None:
        if not torch.cuda.is_available():
            raise ConfigurationError("no GPU to compile for is visible; name one with --arch sm_90a or --arch sm_100a")
        arch = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    if arguments.kernel != "fa3":
        _build_fa4(arch, num_sms)
    if arguments.kernel == "fa3" or (arguments.kernel == "all" and arch == native.ARCH):
        _build_fa3(arch, required=arguments.kernel == "fa3")
    return 0


def _build_fa4(arch: str, num_sms: int | None) -> None:
    import torch

    if num_sms is None and torch.cuda.is_available():
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    try:
        from fa4_a2a import build, cache

        if arch not in build.NUM_SMS:
            raise ConfigurationError(f"there are kernels for {', '.join(build.NUM_SMS)}, and this GPU is {arch}")
        try:
            cache.cache_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
            build.build_all(arch, num_sms, report=lambda k: print(f"{k.seconds:6.1f} s  {k.name}", flush=True))
        except BrokenPipeError:
            raise
        except (cache.CacheError, OSError) as error:
            way_out = "set FA_A2A_CACHE_DIR to a writable folder"
            raise ConfigurationError(f"the kernel cache {cache.cache_dir()}: {error}; {way_out}") from error
    except ImportError as error:
        raise ConfigurationError(f"the CuTe DSL is not usable ({error}); pip install 'fa_a2a[kernels]'") from error


def _build_fa3(arch: str, required: bool) -> None:
    """One object for each head dimension, tile and dtype. Where it cannot be compiled and is not required, says why."""
    if arch != native.ARCH:
        raise ConfigurationError(f"kernel fa3 is for {native.ARCH}, got --arch {arch}; leave --kernel fa3 out")
    for variant in (v for d in native.TILES for t in ("bfloat16", "float16") for v in native.variants(d, t)):
        if (trouble := native.problem(variant)) is not None:
            if required:
                raise UnsupportedError(trouble)
            print(f"  left out: {trouble}", flush=True)
            return
        begin = time.perf_counter()
        native.build(variant)
        print(f"{time.perf_counter() - begin:6.1f} s  {variant.name}", flush=True)
