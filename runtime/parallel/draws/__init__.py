"""What blocks draw besides the masks of an nn.Dropout: keyed as those are, so that no mesh and no schedule changes it.

`mode` sees that a block draws, and says by which key, of which the place in the code is a part (`call_places`);
`functions` says what is given in place of what torch draws: `numbers` has its distributions as functions of words,
`noise` its dropouts and its attention. Imports `blocks`, `comm`, and `dropout` beside it.
"""
