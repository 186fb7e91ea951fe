"""What one GPU kernel compiles to, looked at closely and with no GPU.

``kernel`` compiles and tells, ``residency`` computes occupancy, ``loops`` counts the hot loops' instructions and tensor-core
work, ``layouts`` reads Triton's choices, ``lines`` traces instructions to source lines, ``ptx`` finds loops before the
assembler, ``differences`` holds two of anything against each other, ``binaries`` reads what somebody else compiled, and
``tools`` finds NVIDIA's programs.
"""

from __future__ import annotations

from peakattn_lab.inspection import binaries, layouts, lines, ptx, tools
from peakattn_lab.inspection.differences import against_ptxas, assembled, counterpart, difference_table
from peakattn_lab.inspection.kernel import (
    Function,
    Inspection,
    all_loops,
    configured,
    inspect,
    loops_table,
    make_problem,
    notes,
    recorded,
    tables,
    to_dict,
)
from peakattn_lab.inspection.loops import (
    Loop,
    Table,
    Work,
    hot_loops,
    loop_listing,
    needed_flops,
    product_flops,
    products_of,
    work_of,
)
from peakattn_lab.inspection.residency import Occupancy, occupancy, occupancy_rule

__all__ = [
    "Function",
    "Inspection",
    "Loop",
    "Occupancy",
    "Table",
    "Work",
    "against_ptxas",
    "all_loops",
    "assembled",
    "binaries",
    "configured",
    "counterpart",
    "difference_table",
    "hot_loops",
    "inspect",
    "layouts",
    "lines",
    "loop_listing",
    "loops_table",
    "make_problem",
    "needed_flops",
    "notes",
    "occupancy",
    "occupancy_rule",
    "product_flops",
    "products_of",
    "ptx",
    "recorded",
    "tables",
    "to_dict",
    "tools",
    "work_of",
]
