"""Why an attempt failed, whether another one follows, and what it cost."""
