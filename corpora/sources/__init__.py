"""Builders of corpora from recordings that Debian packages: one module for each source, and `build` that joins them."""
