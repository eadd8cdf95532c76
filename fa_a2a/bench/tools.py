"""What `fa-a2a plot` and `fa-a2a compile` do."""

from __future__ import annotations

import argparse

from ..errors import ConfigurationError
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
    return 0
