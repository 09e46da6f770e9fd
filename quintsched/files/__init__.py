"""Careful reading and writing of files: strict JSON and YAML (`strictjson`, `strictyaml`), atomic writes (`atomic`),
plain files of a folder only (`plain`), whole folders (`folders`), and output to a terminal (`terminal`).

Imports `errors` and nothing else; the contents of the files are the business of other packages.
"""
