"""transformers: a Llama with tied embeddings and gradient checkpointing, in the Trainer.

    torchrun --nproc-per-node 4 examples/integrations/with_transformers.py

Nothing is downloaded. Each rank ends with the whole weights written by save_pretrained, once.
"""

import sys

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import mics_dtensor as mics
from mics_dtensor.integrations.transformers import MicsTrainer, shard_pretrained

NUM_STEPS, NUM_MICRO_STEPS = 10, 4
OUTPUT = sys.argv[1] if len(sys.argv) > 1 else "outputs/with_transformers"


class Counting(Dataset):
    """Texts that count on, each from a start and with a stride of its own."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        starts = torch.randint(0, 64, (NUM_STEPS * NUM_MICRO_STEPS * 4 * 2, 1), generator=draw)
        strides = torch.randint(1, 4, starts.shape, generator=draw)
        self.texts = (starts + strides * torch.arange(16)) % 64

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def build(*, tie: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tie))


def main() -> None:
    dist.init_process_group("gloo")
    topology = mics.Topology.uniform(world_size=4, ranks_per_node=2)
    mesh = mics.init_mesh(mics.Layout(topology=topology, partition_size=2), device_type="cpu")
    model = build()
    model.activation_checkpointing_enable()
    shard_pretrained(model, mesh=mesh)
    mics.apply_mics(model, topology=topology)
    mics.synchronize_replicas(model)
    arguments = TrainingArguments(
        output_dir=OUTPUT,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=NUM_MICRO_STEPS,
        max_steps=NUM_STEPS,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = MicsTrainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train()
    for log in trainer.state.log_history if dist.get_rank() == 0 else ():
        if "loss" in log:
            print(f"step {log['step']:2d}  loss {log['loss']:.6f}", flush=True)
    trainer.save_model()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
