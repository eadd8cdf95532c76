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


def _disassembled(path: Path) -> str:
    image = max(cubins(path.read_bytes()), key=len)  # nvcc adds an empty one for the device linker
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        return subprocess.run([disassembler(), "-c", file.name], check=True, capture_output=True, text=True).stdout


def instructions(path: Path) -> list[str]:
    """One line per instruction, without its address; labels are made alike so that two kernels can be compared."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", _disassembled(path))
    return [re.sub(r"\.L_x_\d+", ".L", line) for line in lines]


def beyond_what_is_left(path: Path) -> list[str]:
    """Instructions that name a register which the warps that get there have given back (setmaxnreg): they would end
    the kernel as illegal ones. ptxas does not hold itself to the smaller number."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in _disassembled(path).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction[1])
    found: set[int] = set()
    for start, instruction in enumerate(code):
        if (changed := re.search(r"SETMAXREG\.DEALLOC\S* (0x[0-9a-f]+)", instruction)) is None:
            continue
        seen, ways = set(), [start + 1]
        while ways:
            at = ways.pop()
            if at in seen or at >= len(code) or "SETMAXREG" in code[at]:
                continue
            seen.add(at)
            ways += [labels[name] for name in re.findall(r"\.L_x_\d+", code[at])]
            if not re.match(r"(EXIT|BRA|RET)\b", code[at]):  # unconditional
                ways.append(at + 1)
            if any(int(number) >= int(changed[1], 16) for number in re.findall(r"\bR(\d+)", code[at])):
                found.add(at)
    return [code[at] for at in sorted(found)]


def opcodes(lines: list[str]) -> list[str]:
    return [re.sub(r"^@!?U?P\w+\s+", "", line).split(" ")[0] for line in lines]


def uses(lines: list[str], prefix: str) -> int:
    return sum(op.startswith(prefix) for op in opcodes(lines))


def no_local_memory(lines: list[str]) -> bool:
    return not uses(lines, "LDL") and not uses(lines, "STL")
