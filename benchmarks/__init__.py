"""One script per claim; each prints a table, and its figures as JSON."""
