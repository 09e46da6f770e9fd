"""Pictures of plans and traces: `render` draws one simulated plan, `render_measured` a measured step below,
`compare` several plans on one time axis, `render_collective` a spelled-out collective, `render_tuning` the result of a
search for strategies, `render_stall` the positions of ranks in a stall; `save_page` writes the interactive page of a
plan (as `render` does into a `.html` file), `save_compared` that of several, `save_untimed` that of a plan that may be
unable to finish, `save_events` trace events for Perfetto and Chrome, and `save_report` one page of a run.

    from quintsched.viz import compare, render

    render(plan.simulate(), Path("plan.png"))

matplotlib is imported by the first picture, not with this package, and not for pages and events. Imports the planner,
and neither torch nor the runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .draw_timeline import compare, render, render_collective, render_measured
    from .frontier import render_tuning
    from .page.plan_page import save_compared, save_page, save_untimed
    from .runs.run_report import save_report
    from .runs.stall_picture import render_stall
    from .runs.training_curves import render_training
    from .write_chrome_trace import save_events

__all__ = [
    "compare",
    "render",
    "render_collective",
    "render_measured",
    "render_stall",
    "render_training",
    "render_tuning",
    "save_compared",
    "save_events",
    "save_page",
    "save_report",
    "save_untimed",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'quintsched.viz' has no attribute {name!r}")
    homes = {
        "save_events": ".write_chrome_trace",
        "save_compared": ".page.plan_page",
        "save_page": ".page.plan_page",
        "save_report": ".runs.run_report",
        "save_untimed": ".page.plan_page",
        "render_tuning": ".frontier",
        "render_stall": ".runs.stall_picture",
        "render_training": ".runs.training_curves",
    }
    return getattr(import_module(homes.get(name, ".draw_timeline"), __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
