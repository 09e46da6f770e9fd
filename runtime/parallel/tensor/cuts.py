"""Former name of `quintsched.runtime.parallel.tensor.cuttable_layers`: an import raises the new name."""

raise ImportError("quintsched.runtime.parallel.tensor.cuts is quintsched.runtime.parallel.tensor.cuttable_layers now")
