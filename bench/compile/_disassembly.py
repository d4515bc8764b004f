"""The machine code of compiled kernels as text.

Most of the disassembler's time is its start, so many kernels go through it at once: their code one after another, as if
it were a single kernel's.
"""

import pathlib
import re
import struct
import subprocess
import tempfile
from typing import NamedTuple

import triton

BIN = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
_MACHINES = {"sm_80": "SM80", "sm_90": "SM90a"}  # as Triton compiles for them
_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


class Instruction(NamedTuple):
    address: int
    opcode: str
    operands: str  # as written; addresses of code are on the scale of ``address``


def run(tool: str, *arguments: str) -> str:
    return subprocess.run([BIN / tool, *arguments], capture_output=True, text=True, check=True).stdout


def complaints(tool: str, *arguments: str) -> str:
    """Returns what a tool says beside its output."""
    return subprocess.run([BIN / tool, *arguments], capture_output=True, text=True, check=True).stderr


def code(cubin: bytes) -> bytes:
    """Returns the section .text of a file in ELF's 64-bit format that holds one kernel."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = sections[names][4]
    (code_section,) = (s for s in sections if cubin.startswith(b".text.", start + s[0]))
    offset, length = code_section[4:]
    return cubin[offset : offset + length]


def instructions(text: str) -> list[Instruction]:
    """Returns those of a disassembler's text, but for the NOPs that fill a kernel up."""
    parsed = (Instruction(int(m[1], 16), m[2], m[3]) for m in map(_SASS.match, text.splitlines()) if m)
    return [i for i in parsed if i.opcode != "NOP"]


def disassembled(cubins: list[bytes], arch: str) -> list[list[Instruction]]:
    """Returns the instructions of each kernel."""
    parts = [code(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as f:
        f.write(b"".join(parts))
        f.flush()
        text = run("nvdisasm", "--binary", _MACHINES[arch], f.name)
    listing = instructions(text)
    kernels, start = [], 0
    for part in parts:
        end = start + len(part)
        kernels.append([i for i in listing if start <= i.address < end])
        start = end
    return kernels
