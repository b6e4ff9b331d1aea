"""Build speech corpora, questions and small models without a hub. Imports audiorl; audiorl never imports it."""
