"""A model as a list of blocks: how they are built and called, what they cost, which shapes pass between them.

`blocks` builds, `costs` estimates or measures, `shapes` finds what passes between them without data, `dtensor` takes in
modules that PyTorch has sharded. Imports `comm`; knows no mesh.
"""
