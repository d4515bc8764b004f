"""What a training script needs beside the model: checkpoints, optimizer help, replicas, packing, the DTensor view."""
