"""The ways in and out: DeepSpeed's checkpoints in, safetensors and one torch file out."""
