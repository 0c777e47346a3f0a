"""Which layout, hardware or change is best, and what a whole run takes: `layouts`, `optimise`, `what_if`, `design`,
`goodput`, `training_run`, `compare_clusters`."""
