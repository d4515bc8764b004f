"""bench.host in a process of its own: what a block starts, and that its calls run."""

from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("triton")

from bench.measured import host
from tests.forking import forking

NORM = "bias, dropout, residual, norm"
COUNTED = NORM, "BERT block", "torch: BERT block", "Llama block", "torch: Llama block"


def _counted() -> dict[str, list[dict[str, int]]]:
    from bench import idle
    from bench.host import kernels, pairs

    idle.install()
    made = {name: [dict(kernels(task)) for task in both] for name, both in pairs().items() if name in COUNTED}
    again = {name: [task() is not None for task in both] for name, both in pairs().items()}
    assert all(all(ran) for ran in again.values())
    return made


@pytest.mark.slow  # its kernels are compiled
def test_kernels_of_a_block():
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        made = pool.submit(_counted).result()
    totals = {name: [sum(one.values()) for one in both] for name, both in made.items()}
    assert totals[NORM] == [1, 2]  # nothing is copied for a backward that recomputes n, which was not asked for
    assert totals["BERT block"][0] == totals["Llama block"][0] == 8
    assert totals["torch: BERT block"][0] > 8 and made["BERT block"][1]["_dkdv_kernel"] == 1
    assert totals["BERT block"][1] <= 20 and "copy_" not in made["BERT block"][1]  # no gradient is cast
    assert totals["Llama block"][1] <= 16 and "_reduce_kernel" not in made["Llama block"][1]  # it has no bias


def test_table():
    rows = [
        dict(call="norm", us=[10.4, 20.0], kernels=[1, 2]),
        dict(call="torch: norm", us=[20.0, 40.8], kernels=[3, 4]),
        dict(call="alone", us=[1.0, 2.0], kernels=[1, 1]),
    ]
    text = host([dict(rows=rows)]).splitlines()
    assert text[2] == "| norm | 10 + 20 | 1 + 2 | 20 + 41 | 3 + 4 | 0.50 |"
    assert text[3:5] == ["| alone | 1 + 2 | 1 + 1 |  |  |  |", ""]
    faster = [rows[0] | dict(us=[5.0, 10.2]), *rows[1:2]]  # on another processor, without the last call
    text = host([dict(rows=rows), dict(rows=faster)]).splitlines()
    assert text[2].endswith(" | 0.50 | 0.25 |") and text[3].endswith(" |  |  |  |  |")
