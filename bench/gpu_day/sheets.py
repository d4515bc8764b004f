"""A card's two ceilings, copy bandwidth and matrix rate, by its maker's data sheet."""

from dataclasses import dataclass

from tpfuse.tools.ledger.mfu import known_peak

MEMORY_GBS = {  # by what is in the device's name; NVIDIA's data sheets "H100 Tensor Core GPU", "H200 Tensor Core GPU"
    "NVIDIA H200": 4800.0,
    "NVIDIA H100 PCIe": 2000.0,
    "NVIDIA H100 80GB HBM3": 3350.0,
}


@dataclass(frozen=True)
class Sheet:
    """The maker's numbers: MFU divides by its dense bf16 rate, which is 989 TFLOP/s of an H100 SXM and of an H200."""

    matrix_tflops: float
    memory_gbs: float


def data_sheet(name: str) -> Sheet | None:
    """Returns None for a card that is not in the table: shares are then of what was measured."""
    peak, memory = known_peak(name), next((gbs for key, gbs in MEMORY_GBS.items() if key in name), None)
    return None if peak is None or memory is None else Sheet(peak / 1e12, memory)
