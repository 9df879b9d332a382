"""MiCS where people already train: one file a framework, each imported by those who have it.

`lightning`: MicsStrategy for Lightning's Trainer (Fabric needs none: examples/integrations).
`accelerate`: MicsAccelerator, layout_of.
`transformers`: shard_pretrained, and MicsTrainer, which goes before TRL's trainers too.
`micro_steps`: what they share. Nothing is loaded by this file.
"""
