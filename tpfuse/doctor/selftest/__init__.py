"""Every op on small tensors against its definition in fp64, and a block over the group."""
