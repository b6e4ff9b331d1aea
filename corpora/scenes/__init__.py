"""Scenes composed of recorded sounds, with their thoughts, silent videos and edits, and a tagger of them."""
