"""Build speech corpora and questions without a hub. Imports audiorl; audiorl never imports it."""
