"""What titan-debug contributes: nothing yet. It is installed, listed and versioned like any other plugin."""

api = (1, 0)
