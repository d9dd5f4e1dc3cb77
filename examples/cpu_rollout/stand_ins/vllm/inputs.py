"""Stand-in: a name for annotations."""

MultiModalDataDict = dict
