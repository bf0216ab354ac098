"""How the machines of a job meet, agree on who trains, and report to each other."""
