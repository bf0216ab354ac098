"""The commands of titan-simulate."""
