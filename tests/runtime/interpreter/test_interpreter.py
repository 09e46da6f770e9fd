"""The dispatch table is whole, and the public names exist."""

import importlib
import pkgutil
from types import ModuleType

import quintsched.runtime
from quintsched.ir import instruction_set
from quintsched.runtime.interpreter.handler_table_and_loop import HANDLERS


def test_every_instruction_has_a_handler() -> None:
    assert set(HANDLERS) == {kind for kind in instruction_set.ALL if not issubclass(kind, instruction_set.Message)}


def test_every_public_name_can_be_had_and_none_is_hidden_by_a_module() -> None:
    for module in pkgutil.walk_packages(quintsched.runtime.__path__, "quintsched.runtime."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in quintsched.runtime.__all__:
        found = getattr(quintsched.runtime, name)
        assert found is not None
        assert not isinstance(found, ModuleType), name
