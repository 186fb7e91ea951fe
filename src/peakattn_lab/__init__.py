"""The laboratory of peakattn: measure, compare, inspect and document its kernels. It imports peakattn, never the reverse.

``cli`` has a file for each group of commands, which only turn options into calls and results into tables.

What is measured, and trusted: ``problems`` names problem sets, ``baselines`` are the rivals, ``gate`` and ``accuracy`` hold
outputs to the oracle, ``timing`` and ``observe`` measure, ``workers`` keeps crashes in processes of their own, ``records``
keeps rows with their ``provenance``.  What runs on that: ``bench`` and ``hostcost``, ``runone``, ``sweep``, ``tune``,
``ladder``; ``compare`` and ``regress`` hold rows against each other.  What kernels are made of: ``compiled``,
``inspection``, ``profiling``, ``roofline``.  What others see: ``docs``, ``plots``, ``report``, ``demo``, ``doctor``,
``selftest``.  ``wording`` puts configs and errors in few words.
"""
