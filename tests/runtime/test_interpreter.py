"""The dispatch table is whole, and the public names exist."""

import quintsched.runtime
from quintsched import instructions
from quintsched.runtime.interpreter import HANDLERS


def test_every_instruction_has_a_handler() -> None:
    assert set(HANDLERS) == {kind for kind in instructions.ALL if not issubclass(kind, instructions.Message)}


def test_every_public_name_can_be_had() -> None:
    assert all(getattr(quintsched.runtime, name) is not None for name in quintsched.runtime.__all__)
