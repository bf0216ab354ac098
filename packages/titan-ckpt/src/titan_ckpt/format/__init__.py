"""A checkpoint on disk: manifest, checksummed chunks, folders, and reading and writing them through DCP."""
