"""TRL's SFTTrainer with MiCS: MicsTrainer goes before it.

    torchrun --nproc-per-node 4 examples/integrations/with_trl.py

The model, the texts and the losses are those of with_transformers.py. Nothing is downloaded: the
tokenizer only says which tokens end and pad a text, since the texts are tokens already.
"""

import sys

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import mics_dtensor as mics
from mics_dtensor.integrations.transformers import MicsTrainer, shard_pretrained

NUM_STEPS, NUM_MICRO_STEPS = 10, 4
OUTPUT = sys.argv[1] if len(sys.argv) > 1 else "outputs/with_trl"


class MicsSFTTrainer(MicsTrainer, SFTTrainer):
    """SFTTrainer, whose accumulation is in micro-steps."""


dist.init_process_group("gloo")
draw = torch.Generator().manual_seed(0)
starts = torch.randint(0, 64, (NUM_STEPS * NUM_MICRO_STEPS * 4 * 2, 1), generator=draw)
strides = torch.randint(1, 4, starts.shape, generator=draw)
texts = (starts + strides * torch.arange(16)) % 64

topology = mics.Topology.uniform(world_size=4, ranks_per_node=2)
mesh = mics.init_mesh(mics.Layout(topology=topology, partition_size=2), device_type="cpu")
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
shard_pretrained(model, mesh=mesh)
mics.apply_mics(model, topology=topology)
mics.synchronize_replicas(model)

words = WordLevel({"<pad>": 64, "<eos>": 65}, unk_token="<pad>")
arguments = SFTConfig(
    output_dir=OUTPUT,
    use_cpu=True,
    bf16=False,
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
trainer = MicsSFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"input_ids": texts.tolist()}),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>"
    ),
)
trainer.train()
for log in trainer.state.log_history if dist.get_rank() == 0 else ():
    if "loss" in log:
        print(f"step {log['step']:2d}  loss {log['loss']:.6f}", flush=True)
dist.destroy_process_group()
