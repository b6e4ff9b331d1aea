"""A benchmark of four-choice questions about speech, sounds and music, made from Debian packages and a synthesizer."""
