"""Compile what a launcher would launch, for a GPU that is not here, and read what the assembler says of it.

``capture(call, arch)`` runs a launcher on meta tensors and records its launches: the very kernels, dtypes, constants
and parameters that this arch would get.  ``reports`` builds them.  TRITON_INTERPRET must not be set: it
replaces ``triton.jit``.
"""

import hashlib
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from bench.compile._account import account, loops
from bench.compile._disassembly import Instruction, complaints, disassembled, run
from tpfuse.kernels.runtime import launch as _launch

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}
COUNTED = "HGMMA", "HMMA", "UTMALDG", "LDGSTS", "PREEXIT", "ACQBULK"
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_TYPES |= {torch.int64: "i64", torch.int32: "i32", torch.bool: "i1", torch.uint8: "u8"}


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
    opcodes: dict[str, int]  # those that tell how it works: HGMMA, UTMALDG, LDGSTS, LDG.E.128
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


def _kind(value: Any) -> str:
    """An argument's type as the compiler writes it; descriptors carry their block."""
    if isinstance(value, Tensor):
        return "*" + _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")


def _divisible(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def _leaves(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(path, value) of an argument, or of each field of a record."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from _leaves(part, (*path, i))
    else:
        yield path, value


def _signature(value: Any, constant: set[tuple[int, ...]], path: tuple[int, ...]) -> Any:
    if path in constant:
        return "constexpr"
    if isinstance(value, tuple):  # a record keeps its class: kernels read its fields by name
        return type(value)(*(_signature(part, constant, (*path, i)) for i, part in enumerate(value)))
    return _kind(value)


def target_of(arch: str) -> GPUTarget:
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


def _ast(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """Returns what Triton compiles, and the options it compiles with."""
    parameters = {p.name: p for p in launch.kernel.params}
    values = dict(zip(parameters, launch.args)) | {k: v for k, v in launch.config.items() if k in parameters}
    options = {k: v for k, v in launch.config.items() if k not in parameters}
    constant, aligned = {}, {}
    for i, (name, parameter) in enumerate(parameters.items()):
        if parameter.is_constexpr:
            constant[(i,)] = values[name]
            continue
        for path, value in _leaves(values[name], (i,)):
            if value is None or (type(value) is int and value == 1 and not parameter.do_not_specialize):
                constant[path] = value
            elif _divisible(value) and not parameter.do_not_specialize:
                aligned[path] = [["tt.divisibility", 16]]
    signature = {name: _signature(values[name], set(constant), (i,)) for i, name in enumerate(parameters)}
    return ASTSource(launch.kernel, signature, constant, aligned), options


def build(launch: Launch, arch: str) -> Any:
    """Returns Triton's compiled kernel."""
    source, options = _ast(launch)
    return triton.compile(source, target=target_of(arch), options=options)


def digest(launch: Launch, arch: str) -> str:
    """Returns what tells a kernel from another before it is compiled."""
    return digest_of(*_ast(launch), arch)


def digest_of(source: ASTSource, options: dict[str, Any], arch: str) -> str:
    """Returns a hash of Triton's first form of a kernel, which knows nothing of comments and line numbers, and of its
    options.  One version of Triton makes the same code of the same."""
    target = target_of(arch)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options | source.parse_options())
    helpers = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target, parsed, *helpers, context)
    return hashlib.sha256(f"{module.str_nodebug()} {sorted(options.items())}".encode()).hexdigest()[:12]


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
            read = [found | dict(account=account(*each)._asdict()) for found, *each in zip(read, codes, threads)]
    return [
        Report(
            kernel=launch.kernel.fn.__name__,
            shared_bytes=compiled.metadata.shared,
            threads=each,
            digest=digest(launch, arch),
            **found,
        )
        for launch, compiled, each, found in zip(launches, built, threads, read)
    ]


def serialised(ptx: str) -> list[str]:
    """Returns the assembler's warnings that asynchronous products of a kernel for sm_90 wait for one another, which
    nothing in a report shows."""
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
    first, last = max(loops(code), key=lambda loop: loop[1] - loop[0], default=(0, math.inf))
    body = [i for i in code if first <= i.address <= last]
    opcodes = {want: sum(op.startswith(want) for _, op, _ in code) for want in COUNTED}
    opcodes["LDG.128"] = sum(op.startswith("LDG") and "128" in op for _, op, _ in code)
    return dict(registers=registers, spill_bytes=stack, instructions=len(body), opcodes=opcodes)


def _read_amd(asm: str) -> dict[str, Any]:
    number = lambda key: int(re.search(rf"\.{key}:\s*(\d+)", asm)[1])
    code = [line.split()[0] for line in asm.splitlines() if re.match(r"\t[a-z]+_\w+", line)]
    opcodes = {"MFMA": sum("mfma" in op for op in code)}
    sizes = dict(registers=number("vgpr_count"), spill_bytes=number("private_segment_fixed_size"))
    return dict(**sizes, instructions=len(code), opcodes=opcodes)
