"""torch's own tools on parameters that are split over tensor-parallel ranks: right, or refused before anything changes.

They are given parameters, not layers, and know nothing of ranks that hold other slices.  What they are given is looked
up among the living parallel layers; a process without split parameters gets torch's own code and its bits.

accelerate       accelerate's Accelerator without the mix-in
behind           how a function or method is replaced, and put back
clip             torch.nn.utils' clipping by norm
elementwise      optimizers that look at whole tensors, refused on slices
groups           which tools send parameters over which group: DDP, FSDP, replicate, distribute_tensor
guard            replaces what the table says, and puts it back
known            what a tensor that a tool is given is a slice of
norm             the norm of a whole model's gradients
optimizer_state  torch's optimizers in state dictionaries: whole where a parameter is split
replica_shards   how FSDP2 divides a slice over the replicas
reparametrized   weight_norm, prune and their like, refused on split weights
scaler           torch.amp.GradScaler
table            all that is replaced
"""
