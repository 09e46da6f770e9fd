"""What is settled at the beginning of every step: how many samples there are, in which shapes, numbered from where.

header      what the first stage's rank says to its pipeline            units     what each unit of the step is
"""
