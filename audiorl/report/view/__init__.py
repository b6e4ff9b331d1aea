"""`audiorl view RUNS…`: run folders as a local web page that follows them while they train, and a tool for labels.

index.py      what runs add to their folders; their rollouts in SQLite: search, filters, order
fragments.py  rollouts, groups, evaluations and tokens as HTML, from the parts of the static report
sound.py      addresses of clips, the clips themselves, spectrograms
labels.py     the file of labels, and which answers are asked next
server.py     the routes, the token and the checks of requests
report/assets has the page, its scripts and its style sheet.
"""
