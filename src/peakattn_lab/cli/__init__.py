"""The ``peakattn`` command. Commands import what they need when they run, so that ``--help`` is instant."""

from __future__ import annotations

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit('the peakattn command needs more packages; install them with: pip install "peakattn[lab]"') from None

from peakattn_lab.cli import basics, compiling, measuring

app = typer.Typer(
    name="peakattn",
    help="Exact attention at peak speed for PyTorch: see what runs, check it, time it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

for command in (
    basics.doctor,
    basics.demo,
    basics.explain,
    measuring.bench,
    compiling.compiled,
    measuring.compare,
    measuring.roofline,
    compiling.inspect,
    basics.selftest,
    basics.docs,
):
    app.command()(command)


def main() -> None:
    """Entry point of the ``peakattn`` command."""
    app()
