"""Which layout, hardware or change is best: `layouts`, `optimise`, `what_if`, `design`."""
