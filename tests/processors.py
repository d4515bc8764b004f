"""Runs the everyday suite as other processors would compute: with the instructions that torch and its libraries use
limited.  A result must not hang on the kind of processor.

What this processor does not have is not run: without AVX-512, "avx512" and "all" are as "avx2".
"""

import sys

from tests import suites

# ATen's own loops, oneDNN's and MKL's kernels are chosen apart; each variable is read when torch is loaded.
PROCESSORS = {
    "all": {},  # what this one has, AMX too
    "avx512": dict(ATEN_CPU_CAPABILITY="avx512", ONEDNN_MAX_CPU_ISA="AVX512_CORE", MKL_ENABLE_INSTRUCTIONS="AVX512"),
    "avx2": dict(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2"),
    "sse4": dict(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", MKL_ENABLE_INSTRUCTIONS="SSE4_2"),
}


def setting(name: str) -> suites.Setting:
    variables = PROCESSORS[name]
    return suites.Setting(variables=variables, about=" ".join(f"{key}={value}" for key, value in variables.items()))


if __name__ == "__main__":
    sys.exit(suites.command("tests.processors", __doc__, PROCESSORS, setting))
