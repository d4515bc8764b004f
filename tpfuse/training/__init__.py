"""Parts of a training script beside the model: checkpoints, optimizer help, replicas, packing, the DTensor view.

calls          CallRecord: replicas compare the calls of a step
checkpoint/    checkpoints that survive a kill and resume at any size
data_parallel  data_parallel: replicas under DistributedDataParallel, and what it refuses
delayed_gradients  DelayedGradients: gradients one step late in one process
dropped        parameters that no module has any more: an optimizer's step on them is an error
dtensor        parameters as DTensors, for FSDP2
expert_load    balance_experts: biases of routers by the load of their experts
foreign/       torch's own tools on split parameters: right, or refused
kfac/          KFAC: gradients times inverse factors of curvature, in a pipeline's bubbles too
main_grad      MainGrad: gradients in fp32 over micro-batches, and fp32 weights
micro_batches  MicroBatchReplica: gradients of micro-batches as a binary tree over all replicas
matrices       whole weight matrices, for Muon and its like
ok_topk/       gradients over slow links: the sum of what is large, the rest kept
optim          param_groups, clip_grad_norm_
originals      tensors that optimizers step on in the place of others
packing        documents packed into rows, balanced over replicas
sharded_trees  the tree of micro-batches where FSDP2 shards the gradients
totals         the buffers of a MainGrad: sums of gradients and fp32 weights
"""
