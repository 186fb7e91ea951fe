"""peakattn roofline: what a device allows attention at most, and how near the records come.

``ceilings`` has what GPUs can do, by their data sheets and measured with ``ceiling_kernels``; ``work`` and
``traffic`` have what a problem asks of each part of one, ``roofs`` sets problems and records under them, ``picture`` draws it.
"""
