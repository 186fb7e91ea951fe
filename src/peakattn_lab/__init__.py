"""The laboratory of peakattn: measure, compare, inspect and document its kernels. It imports peakattn, never the reverse."""
