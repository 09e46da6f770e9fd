"""The one request from which a plan is compiled: `request` declares its settings, `reading` reads their values.

Python, the command line and job files fill it. Imports `ir` and `errors`, and nothing heavy, at once; what a setting
needs besides (schedules, costs, plans) when it is read.
"""

from quintsched.request.request import CompileRequest, Entry, Setting, entries, settings

__all__ = ["CompileRequest", "Entry", "Setting", "entries", "settings"]
