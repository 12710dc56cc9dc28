"""The table of what kernels compile to reads the assembler's listings; test_triton_compile.py makes real ones."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from tools.kernel_table import Compiled, count_instructions, main

LISTING = """
        Function : attend_tile
        /*0000*/                   MOV R1, c[0x0][0x28] ;                 /* 0x00000a0000017a02 */
        /*0010*/              @!P0 BRA 0x30 ;                             /* 0x0000000000008947 */
        /*0020*/                   IADD3 R2, R2, 0x1, RZ ;                /* 0x0000000102027810 */
        /*0030*/                   CALL.REL.NOINC 0x{call} ;              /* 0x0000000000009944 */
        /*0040*/                   NOP ;                                  /* 0x0000000000007918 */
        /*0050*/               @P1 BRA 0x20 ;                             /* 0xffffffa000001947 */
        /*0060*/                   BRA 0x60;                              /* 0xfffffff000007947 */
        /*0070*/                   BPT.TRAP 0x1 ;                         /* 0x000000040000795c */
        /*0080*/                   RET.REL.NODEC R2 0x0 ;                 /* 0xfffffff002007950 */
"""


@pytest.mark.parametrize(
    ("target", "calls"),
    [("80", 1), ("50", 0), ("70", 0)],
    ids=["a routine", "the code behind it", "a trap"],
)
def test_instructions_of_a_loop_are_counted(target: str, calls: int) -> None:
    assert count_instructions(LISTING.replace("{call}", target)) == (9, 4, calls)


def test_code_without_a_loop_has_none() -> None:
    straight = "\n".join(LISTING.replace("{call}", "80").splitlines()[:4])
    assert count_instructions(straight) == (2, 0, 0)


def test_an_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 1
    assert "unset TRITON_INTERPRET" in capsys.readouterr().out


def test_figures_have_names() -> None:
    assert Compiled._fields[:3] == ("registers", "stack", "shared")
