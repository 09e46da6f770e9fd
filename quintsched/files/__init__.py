"""Files read and written with care: JSON without surprises (`strictjson`), files whole or not at all (`atomic`).

Imports `errors` and nothing else; what stands in the files is the business of other rooms.
"""
