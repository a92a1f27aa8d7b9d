"""See a run: in the browser, in a single file, in a notebook, in a terminal. Reads runs, nothing else."""
