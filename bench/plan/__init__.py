"""The planner against published numbers: ``python -m bench.plan.published``."""
