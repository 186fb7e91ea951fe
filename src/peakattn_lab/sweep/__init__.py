"""peakattn sweep: every config of a kernel on a set of problems.

``grid`` makes the candidates; ``budget`` and ``smem`` say what they take before anything is compiled, and ``budget_check``
holds that to the compiler; ``jobs`` compiles in worker processes and ``measure`` measures in one; ``run`` puts it together;
``predict`` foretells times from machine code; ``tables`` and ``heatmap`` show what was found.
"""
