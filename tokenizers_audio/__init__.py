"""Neural audio codecs. This package never imports audiorl."""
