"""What titan-ckpt contributes: nothing yet. It is installed, listed and versioned like any other plugin."""

api = (1, 0)
