"""What every kernel stands on: registration of ops, launches, tuned parameters, Philox, the one import of Triton."""
