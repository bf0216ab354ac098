"""What a person at the terminal sees of the ranks, and the signals that they send."""
