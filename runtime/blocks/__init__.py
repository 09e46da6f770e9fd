"""A model as a list of blocks: building and calling them, their costs, the tensor shapes that pass between them.

`blocks` builds, `costs` estimates or measures, `shapes` infers shapes on the meta device without data, `dtensor`
accepts modules that PyTorch has sharded. Imports `comm`; does not depend on the mesh.
"""
