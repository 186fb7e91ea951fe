"""Reading machine code, on a listing and a cubin small enough to check by eye."""

from __future__ import annotations

import pytest

from peakattn.backends import cubin

LISTING = """
\t\tFunction : attention_fwd_kernel
        /*0000*/                   LDC R1, c[0x0][0x28] ;                   /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 STL [R1], R2 ;                           /* 0x00000002010079a6 */
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;   /* 0x01e00000041879f0 */
        /*0030*/                   MUFU.EX2 R5, R5 ;                        /* 0x0000000500057308 */
        /*0040*/                   LDL R2, [R1] ;                           /* 0x0000000001027983 */
        /*0050*/             @UP0 BRA 0x20 ;                                /* 0xfffffffc00f00947 */
        /*0060*/                   BRA 0x80 ;                               /* 0x0000000000047947 */
        /*0070*/                   NOP ;                                    /* 0x0000000000007918 */
        /*0080*/                   EXIT ;                                   /* 0x000000000000794d */
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;   /* 0x00000003ff0075a7 */
        /*00a0*/              @!P0 BRA 0x10 ;                               /* 0xfffffffc00f08947 */
"""


def test_opcodes_are_counted_with_and_without_a_predicate() -> None:
    counts = cubin.count_opcodes(LISTING)
    assert counts["HGMMA"] == counts["STL"] == counts["LDL"] == counts["SYNCS"] == 1
    assert counts["BRA"] == 3


def test_a_loop_is_what_a_backward_branch_spans_and_no_retry_behind_the_end() -> None:
    (loop,) = cubin.tensor_loops(LISTING)
    assert loop == {"HGMMA": 1, "MUFU": 1, "LDL": 1, "BRA": 1}


def test_what_is_no_cubin_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"not a 64-bit ELF file; pass the bytes of a cubin\."):
        cubin.entry(b"MZ not an ELF file, long enough", "kernel")
