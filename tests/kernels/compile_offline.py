"""Compile a Triton kernel for a GPU that is not here, and read what the assembler says of it.

    report = compile_offline("tests.kernels.philox_kernel:mask_kernel", dict(x_ptr="*fp32", n="i32"), dict(BLOCK=128), arch=90)

It happens in another process, without TRITON_INTERPRET, which replaces ``triton.jit`` when a kernel is defined.
"""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass

ROOT = pathlib.Path(__file__).parents[2]


@dataclass(frozen=True)
class Report:
    registers: int  # a thread
    spill_bytes: int  # a thread: local memory the register allocator spilled to
    shared_bytes: int  # a block


def compile_offline(kernel: str, signature: dict[str, str], constexprs: dict, arch: int, **options) -> Report:
    request = json.dumps([kernel, signature, constexprs, arch, options])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", __name__, request], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Report(**json.loads(done.stdout.splitlines()[-1]))


def _compile(name: str, signature: dict[str, str], constexprs: dict, arch: int, options: dict) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, attribute = name.partition(":")
    kernel = getattr(importlib.import_module(module), attribute)
    full = {n: "constexpr" if n in constexprs else signature[n] for n in kernel.arg_names}
    # Every pointer and integer counts as divisible by 16, as aligned tensors are at run time.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(full.values()) if kind.startswith("*") or kind in ("i32", "i64")}
    compiled = triton.compile(ASTSource(kernel, full, constexprs, aligned), target=GPUTarget("cuda", arch, 32), options=options)
    cuobjdump = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage = subprocess.run([cuobjdump, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return Report(registers, stack, compiled.metadata.shared)


if __name__ == "__main__":
    print(json.dumps(asdict(_compile(*json.loads(sys.argv[1])))))
