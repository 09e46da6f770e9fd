"""Files read and written with care: JSON and YAML without surprises (`strictjson`, `strictyaml`), files whole or not
at all (`atomic`), and only those that are plain files of a folder (`read_plain_files_only`); what a terminal is shown
(`terminal`), and how far a command is (`terminal_progress`).

Imports `errors` and nothing else; the contents of the files are the business of other packages.
"""
