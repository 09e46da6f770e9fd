"""Former name of `quintsched.stalls.culprit`: an import raises the new name."""

raise ImportError("quintsched.stalls.verdict is quintsched.stalls.culprit now")
