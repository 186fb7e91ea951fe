"""``python -m peakattn_lab`` is the ``peakattn`` command."""

from __future__ import annotations

from peakattn_lab.cli import main

if __name__ == "__main__":
    main()
