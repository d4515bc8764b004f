"""The parts of the day: jobs(context), run(job, context), headline(rows) in each."""
