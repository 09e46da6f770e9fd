"""Any mesh to any mesh: what each rank wrote of its state says where it lies, so that others read what they need of it.

`layout` is what a rank's file says; `saved_state` are the files of all ranks as one; `load_saved` lets an engine be as
they say. Imports `interchange` and what is below it.
"""
