"""Modules that mix positions by a recurrence, in place of the library's, which neither heads nor positions can divide."""
