"""`audiorl view RUNS…`: run folders as a local web page that follows them while they train, and a tool for labels.

follow.py     reads what runs add to metrics.jsonl and rollouts/
index.py      the recorded rollouts of all runs in SQLite: search, filters, order
query.py      what a person types into the search box, as SQL
fragments.py  rollouts, groups and evaluations as HTML, from the parts of the static report
tokens.py     the tokens of a rollout with their recorded numbers
sound.py      addresses of clips, the clips themselves, spectrograms
labels.py     the file of labels, and which answers are asked next
server.py     the routes, the token and the checks of requests
assets/       the page, its scripts and its style sheet
"""
