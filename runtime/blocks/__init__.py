"""A model as a list of blocks: building and calling them, their costs, the tensor shapes that pass between them.

`block_builders` builds, `block_costs` estimates or measures, `shape_inference` infers shapes on the meta device without
data, `dtensor` accepts modules that PyTorch has sharded. Imports `comm`; does not depend on the mesh.
"""
