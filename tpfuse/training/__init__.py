"""What a training script needs beside the model: checkpoints, optimizer help, packing, the DTensor view."""
