"""Memory and time of a job on a machine, from one simulated step of the real trainer."""
