"""Memory that a step frees stays in the process, so that the next step does not fetch every page anew.

glibc takes a CPU's tensors from the top of its heap, and returns the top to the system as soon as more than a threshold
of it is free: after a backward pass that is every page of the step.  The system fills a page with zeros when it is next
touched.  The threshold is twice the largest block of at most 32 MiB that the process has freed (``mallopt(3)``,
M_MMAP_THRESHOLD), 256 KiB at first: a model with small tensors never raises it.
"""

import torch

LARGEST = (32 << 20) - (64 << 10)  # bytes: 32 MiB, less what malloc adds to a block


def keep_freed_memory() -> None:
    """Raises glibc's thresholds to its own largest ones: up to 64 MiB of free memory stay in the process.

    The block is mapped and unmapped without a page touched.  Thresholds that a user sets (MALLOC_TRIM_THRESHOLD_,
    GLIBC_TUNABLES) stay as they are, and another allocator only sees a block come and go.
    """
    torch.empty(LARGEST, dtype=torch.uint8, device="cpu")
