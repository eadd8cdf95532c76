"""SASS out of a compiled kernel: its cubin lies in the shared object as it is, an ELF inside the ELF."""

import os
import re
import shutil
import struct
import subprocess
import tempfile
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

EM_CUDA = 190
PROXY_FENCE = "MEMBAR.ALL.CTA"  # what fence.proxy.async begins with


@lru_cache(maxsize=1)
def disassembler() -> str | None:
    folders = [Path(os.environ[v]) / "bin" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    folders += sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    triton = find_spec("triton")
    if triton is not None and triton.origin:
        folders.append(Path(triton.origin).parent / "backends/nvidia/bin")
    return shutil.which("nvdisasm") or next((str(f / "nvdisasm") for f in folders if (f / "nvdisasm").exists()), None)


def cubins(data: bytes) -> list[bytes]:
    found, at = [], data.find(b"\x7fELF", 1)
    while at >= 0:
        machine, section_table = struct.unpack_from("<H", data, at + 18)[0], struct.unpack_from("<Q", data, at + 40)[0]
        if machine == EM_CUDA:
            program_table = struct.unpack_from("<Q", data, at + 32)[0]
            program_size, programs, section_size, sections = struct.unpack_from("<4H", data, at + 54)
            end = max(section_table + section_size * sections, program_table + program_size * programs)
            found.append(data[at : at + end])
        at = data.find(b"\x7fELF", at + 1)
    return found


def instructions(path: Path) -> list[str]:
    """One line per instruction, without its address; labels are made alike so that two kernels can be compared."""
    image = max(cubins(path.read_bytes()), key=len)  # nvcc adds an empty one for the device linker
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        text = subprocess.run([disassembler(), "-c", file.name], check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text)
    return [re.sub(r"\.L_x_\d+", ".L", line) for line in lines]


def opcodes(lines: list[str]) -> list[str]:
    return [re.sub(r"^@!?U?P\w+\s+", "", line).split(" ")[0] for line in lines]


def uses(lines: list[str], prefix: str) -> int:
    return sum(op.startswith(prefix) for op in opcodes(lines))


def no_local_memory(lines: list[str]) -> bool:
    return not uses(lines, "LDL") and not uses(lines, "STL")
