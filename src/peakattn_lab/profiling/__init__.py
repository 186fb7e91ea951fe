"""peakattn profile: hardware counters of one kernel, read back and held against predictions.

``profilers`` runs Nsight's programs on a ``target`` process, ``diagnosis`` says why there are no counters, ``counters`` reads
them, ``tables`` and ``checklist`` show what it means, ``timeline`` is the host's side.
"""
