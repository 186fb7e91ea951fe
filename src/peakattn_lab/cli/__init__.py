"""The ``peakattn`` command. Commands import what they need when they run, so that ``--help`` is instant."""

from __future__ import annotations

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit('the peakattn command needs more packages; install them with: pip install "peakattn[lab]"') from None

from peakattn_lab.cli import basics, compiling, laddering, measuring, profiling, reporting, running, sweeping, tuning

app = typer.Typer(
    name="peakattn",
    help="The laboratory of peakattn: see what runs and why, check it, time it, take it apart, tune it, publish it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

GROUPS = {
    "See what is here": (basics.doctor, basics.demo, basics.explain),
    "Measure": (measuring.bench, measuring.compare, running.run, sweeping.sweep, tuning.tune, laddering.ladder),
    "Take kernels apart": (compiling.compiled, compiling.inspect, profiling.profile, measuring.roofline),
    "Publish": (basics.selftest, reporting.report, basics.docs),
}
for title, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=title)(command)


def main() -> None:
    """Entry point of the ``peakattn`` command."""
    app()
