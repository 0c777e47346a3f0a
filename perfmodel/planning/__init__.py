"""Planning: the best layout, hardware or change, and the cost of a whole run: `layouts`,
`optimise`, `what_if`, `design`, `goodput`, `training_run`, `compare_clusters`."""
