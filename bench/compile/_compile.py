"""Compile what a launcher would launch, for a GPU that is not here, and read what the assembler says of it.

``capture(call, arch)`` runs a launcher on meta tensors and records its launches: the very kernels, dtypes, constants
and parameters that this arch would get.  ``reports`` builds them.  TRITON_INTERPRET must not be set: it
replaces ``triton.jit``.
"""

import hashlib
import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from bench.compile._account import account, loops
from bench.compile._disassembly import Instruction, complaints, disassembled, run
from tpfuse.kernels.runtime import launch as _launch

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
COUNTED = "HGMMA", "HMMA", "IGMMA", "IMMA", "UTMALDG", "LDGSTS", "PREEXIT", "ACQBULK"


@dataclass(frozen=True)
class Call:
    """Something to compile: ``run()`` calls a launcher on meta tensors.  ``elements`` {kernel: (parameters) -> elements
    that one program (or one turn of its loop) handles} gives instructions an element; ``uses`` {kernel: opcodes} must
    be in its sm_90 code; ``spills`` {kernel: bytes} are exceptions on any arch, with ``why``; ``archs`` and ``only``: a
    call made for some archs and one kernel alone."""

    run: Callable[[], Any]
    elements: dict[str, Callable[[dict], int]] = field(default_factory=dict)
    uses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    spills: dict[str, int] = field(default_factory=dict)
    why: str = ""
    archs: tuple[str, ...] = tuple(SHARED_BYTES)
    only: str | None = None


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    config: dict


@dataclass(frozen=True)
class Report:
    kernel: str
    registers: int  # a thread
    spill_bytes: int  # a thread: local memory the register allocator spilled to
    shared_bytes: int  # a block
    instructions: int  # of the largest loop, or of a kernel without one
    threads: int  # a block
    opcodes: dict[str, int]  # those that tell how it works (HGMMA, UTMALDG, LDGSTS, LDG.E.128), and serialised products
    digest: str  # of what was compiled
    account: dict[str, float] | None = None  # of sm_90: see _account.py


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def capture(call: Callable[[], Any], arch: str) -> list[Launch]:
    launches: list[Launch] = []
    start = lambda kernel, grid, device, args, config: launches.append(Launch(kernel, grid, args, config))
    with mock.patch.object(_launch, "_start", start), _launch.pretending(arch):
        call()
    return launches


def target_of(arch: str) -> GPUTarget:
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


def _ast(launch: Launch, arch: str) -> tuple[ASTSource, dict[str, Any]]:
    """Returns the source that Triton compiles for a launch, and the options it compiles with: those of a start, made
    from the arguments by its own code, so that the binary in its cache is the same."""
    kernel, backend = launch.kernel, make_backend(target_of(arch))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound = bind(*launch.args, **launch.config)
    _, signature, constants, attributes = kernel._pack_args(backend, launch.config, *bound)
    options = {name: value for name, value in launch.config.items() if name not in kernel.arg_names}
    return ASTSource(kernel, signature, constants, attributes), options


def build(launch: Launch, arch: str) -> Any:
    """Returns Triton's compiled kernel."""
    source, options = _ast(launch, arch)
    return triton.compile(source, target=target_of(arch), options=options)


def digest(launch: Launch, arch: str) -> str:
    """Returns a hash of Triton's first form of a kernel and of its options, known before it is compiled.

    Comments, line numbers and the modules of device functions do not enter it.  One version of Triton makes the same
    code of the same form.
    """
    source, options = _ast(launch, arch)
    target = target_of(arch)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options | source.parse_options())
    helpers = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target, parsed, *helpers, context)
    form = re.sub(r"\btpfuse(?:\.\w+)+\.(?=\w)", "", module.str_nodebug())
    return hashlib.sha256(f"{form} {sorted(options.items())}".encode()).hexdigest()[:12]


def reports(launches: list[Launch], arch: str) -> list[Report]:
    """Compiles launches and reads what came out."""
    built = [build(launch, arch) for launch in launches]
    threads = [compiled.metadata.num_warps * target_of(arch).warp_size for compiled in built]
    if arch.startswith("gfx"):
        read = [_read_amd(compiled.asm["amdgcn"]) for compiled in built]
    else:
        cubins = [compiled.asm["cubin"] for compiled in built]
        codes = disassembled(cubins, arch)
        read = [_read_cuda(*each) for each in zip(cubins, codes)]
        if arch == "sm_90":
            read = [counts | dict(account=account(*each)._asdict()) for counts, *each in zip(read, codes, threads)]
            for compiled, counts in zip(built, read):
                counts["opcodes"]["serialised"] = len(serialised(compiled.asm["ptx"]))
    return [
        Report(
            kernel=launch.kernel.fn.__name__,
            shared_bytes=compiled.metadata.shared,
            threads=each,
            digest=digest(launch, arch),
            **counts,
        )
        for launch, compiled, each, counts in zip(launches, built, threads, read)
    ]


def serialised(ptx: str) -> list[str]:
    """Returns the assembler's warnings that asynchronous products of a kernel for sm_90 wait for one another, which no
    count of its opcodes shows."""
    if "wgmma" not in ptx:
        return []
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        log = complaints("ptxas", "-v", "--gpu-name=sm_90a", "--output-file=/dev/null", f.name)
    return [line for line in log.splitlines() if "wgmma" in line and "serialized" in line]


def _read_cuda(cubin: bytes, code: list[Instruction]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        usage = run("cuobjdump", "--dump-resource-usage", f.name)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    start, stop = max(loops(code), key=lambda loop: loop[1] - loop[0], default=(0, math.inf))
    body = [i for i in code if start <= i.address <= stop]
    opcodes = {want: sum(op.startswith(want) for _, op, _ in code) for want in COUNTED}
    opcodes["LDG.128"] = sum(op.startswith("LDG") and "128" in op for _, op, _ in code)
    return dict(registers=registers, spill_bytes=stack, instructions=len(body), opcodes=opcodes)


def _read_amd(asm: str) -> dict[str, Any]:
    number = lambda key: int(re.search(rf"\.{key}:\s*(\d+)", asm)[1])
    code = [line.split()[0] for line in asm.splitlines() if re.match(r"\t[a-z]+_\w+", line)]
    opcodes = {"MFMA": sum("mfma" in op for op in code)}
    sizes = dict(registers=number("vgpr_count"), spill_bytes=number("private_segment_fixed_size"))
    return dict(**sizes, instructions=len(code), opcodes=opcodes)
