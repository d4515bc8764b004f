"""What is counted of a made-up kernel: which loop, which pipe, and the shares that follow."""

import pytest

pytest.importorskip("triton")

from bench.compile._account import BYTES, account, loops
from bench.compile._disassembly import instructions

PRODUCTS = """
    Function : k
        /*0000*/                   S2R R0, SR_TID.X ;                       /* 0x0000000000007919 */
        /*0010*/                   FADD R1, R1, R1 ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   MUFU.EX2 R2, R1 ;
        /*0040*/                   FFMA R2, R2, R3, R4 ;
        /*0050*/              @!P0 FFMA R2, R2, R3, R4 ;
        /*0060*/                   IMAD.WIDE.U32 R6, R2, R3, RZ ;
        /*0070*/                   LOP3.LUT R6, R6, R7, R8, 0x96, !PT ;
        /*0080*/                   LDS.128 R8, [R6] ;
        /*0090*/                   NOP ;
        /*00a0*/               @P1 BRA 0x20 ;
        /*00b0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00c0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00d0*/                   FADD R1, R1, R1 ;
        /*00e0*/                   FADD R1, R1, R1 ;
        /*00f0*/                   FADD R1, R1, R1 ;
        /*0100*/                   FADD R1, R1, R1 ;
        /*0110*/                   FADD R1, R1, R1 ;
        /*0120*/                   FADD R1, R1, R1 ;
        /*0130*/                   FADD R1, R1, R1 ;
        /*0140*/               @P1 BRA 0xb0 ;
        /*0150*/                   EXIT ;
        /*0160*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0170*/               @P0 BRA 0x30 ;
"""
PASS = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   FADD R4, R4, R5 ;
        /*0020*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*0030*/                   EXIT ;
"""


def test_the_first_loop_of_products_counts():
    """Not the larger one, in which tiles are masked, nor what the wait behind EXIT seems to close."""
    code = instructions(PRODUCTS)
    assert loops(code) == [(0x20, 0xA0), (0xB0, 0x140), (0x30, 0x170)] and "NOP" not in {i.opcode for i in code}
    found = account(code, threads=256)
    pipes = dict(tensor=128, issue=16, alu=4, fma=12, mufu=16, memory=8, hbm=0)
    assert found._asdict() == pipes | dict(in_turn=round(128 / 144, 2), overlapped=1.0)


def test_the_shortest_loop_of_products_counts():
    """The tiles at the edges, which are masked, may come before it."""
    product = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;"
    text = PRODUCTS.replace("/*0130*/                   FADD R1, R1, R1 ;", f"/*0130*/ {product}").replace(
        "0xb0", "0x130"
    )
    assert loops(instructions(text))[1] == (0x130, 0x140) and account(instructions(text), threads=256).issue == 4


def test_copies_into_shared_memory_count_as_loads():
    loads, copies = (
        account(instructions(PASS.replace("LDG.E", op)), threads=128) for op in ("LDG.E", "LDGSTS.E.BYPASS")
    )
    assert loads == copies


def test_what_waits_behind_the_end_is_no_loop():
    text = PRODUCTS.replace("@P1 BRA 0x20 ;", "NOP ;").replace("@P1 BRA 0xb0", "@P1 BRA 0x20")
    text = text.replace("@P0 BRA 0x30", "@P0 BRA 0xc0")
    assert loops(instructions(text)) == [(0x20, 0x140), (0xC0, 0x170)]
    assert account(instructions(text), threads=256).tensor == 3 * 128


def test_a_pass_is_held_against_hbm():
    found = account(instructions(PASS), threads=128)
    assert (found.tensor, found.issue, found.memory, found.fma) == (0, 4, 8, 1)
    clocks = 32 * 18 / BYTES
    assert found.hbm == round(clocks) and found.in_turn == round(clocks / (clocks + 8), 2) and found.overlapped == 1.0


def test_products_by_warps_take_longer():
    code = "        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;\n"
    assert account(instructions(code), threads=128).tensor == 8
