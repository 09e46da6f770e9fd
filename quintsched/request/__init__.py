"""Request that a plan is compiled from: `plan_request` declares its settings, `read_setting_values` reads their values.

Python, the command line and job files all fill the same request. At import time it imports only `ir` and `errors`;
heavier modules (schedules, costs, plans) are imported when a setting that needs them is read.
"""

from quintsched.request.plan_request import CompileRequest, PlanSetting, RequestOption, entries, settings

__all__ = ["CompileRequest", "PlanSetting", "RequestOption", "entries", "settings"]
