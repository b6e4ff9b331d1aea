"""The released model families, one file each."""
