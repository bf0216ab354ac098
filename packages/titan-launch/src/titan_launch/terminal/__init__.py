"""What a person at the terminal sees and sends: the status line, the output of ranks, signals."""
