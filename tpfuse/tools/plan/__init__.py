"""The planner: the fastest split of a model's training over machines, by a cost model of devices and links.

all_reduces  the fastest all-reduce by size and number of ranks
check        plans against real steps on this machine
cluster      devices in levels of links: a group's rate; presets, and clusters from TOML
collectives  six all-reduces: their messages, and their seconds on a link
command      options of python -m tpfuse collectives
costs        the cost model of a step on a cluster: pieces, messages, optimizer, state
devices      a device's roofline, data sheets, and this machine as calibrated: seconds of an op
explain      the parts of a plan, what binds the choice, and what would change it
in_flight    micro-batches whose activations a rank keeps at a time
intra/       layouts of a block's ops on a mesh
messages     seconds of messages over tp, over dp and between stages
pieces       costs of embedding, block, head and border, by dry runs of the real model's stages
planning     python -m tpfuse plan, and best_plans
report       plans as a table, as JSON and as a picture
search       branch and bound over all splits
spans        stages as spans of blocks, and their partition by dynamic programming
split        records: a job, a split, and the costs of a model's pieces
step         estimate of a step: seconds by part, peak memory of each rank
topology/    networks as graphs, by networkx
"""
