"""Command line: commands, in modules of a few each, and shared code in `app` and `shared_options`.

Imports all of the planner, and `viz` for drawing: lazily inside the commands, so that `quintsched --help` is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from typer.main import get_command

from quintsched.cli.app import CommandGroup, make_app
from quintsched.cli.check import check
from quintsched.cli.collective import collective
from quintsched.cli.compile_and_show import compile, schedules, show
from quintsched.cli.import_export import export, import_
from quintsched.cli.new import new
from quintsched.cli.pictures import render
from quintsched.cli.run_and_verify import inspect, run, verify
from quintsched.cli.run_commands.checkpoint import CHECKPOINT_COMMANDS as CHECKPOINT
from quintsched.cli.run_commands.data import DATA_COMMANDS as DATA
from quintsched.cli.run_commands.doctor import doctor
from quintsched.cli.run_commands.report import report
from quintsched.cli.run_commands.watch import watch
from quintsched.cli.simulate_and_compare import compare, simulate, whatif
from quintsched.cli.solve import certify, solve
from quintsched.files.terminal import standard_streams
from quintsched.strategies.commands.calibrate import calibrate
from quintsched.strategies.commands.layout_command import layout
from quintsched.strategies.commands.predict_command import predict
from quintsched.strategies.commands.tune_command import tune

SECTIONS: dict[str, tuple[Callable[..., None] | CommandGroup, ...]] = {
    "Plans": (schedules, compile, show, check, simulate, compare, render, new, solve, certify),
    "Runs": (
        run,
        verify,
        inspect,
        watch,
        report,
        whatif,
        CommandGroup("checkpoint", "What runs have saved: show, verify, reshard, export, import.", CHECKPOINT),
        CommandGroup("data", "Token shards that jobs train on: tokenize, show.", DATA),
    ),
    "Strategies": (predict, tune, layout, calibrate),
    "Tools": (collective, export, import_, doctor),
}
"""All commands, by the headings of `quintsched --help`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command (default: `sys.argv`) and exit; `quintsched --help` lists the exit codes."""
    with standard_streams():
        _command()(args=arguments, prog_name="quintsched")


@cache
def _command() -> Any:
    return get_command(make_app(SECTIONS))
