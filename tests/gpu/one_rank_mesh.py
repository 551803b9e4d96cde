"""Shards an MLP and a Llama over a tensor-parallel mesh of one process, and takes a step with each kind of kernel."""

import os
import runpy
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate_recipes.common.parallel.tensor_plan import shipped_plan
from accelerate_recipes.common.parallel.tensor_styles import TensorGroup, divide
from accelerate_recipes.common.step.optimizer import exchange_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
    tie_word_embeddings=False,
)  # fmt: skip

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("tp",))
group = TensorGroup(mesh)
mlp = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "mnist.py"))["MLP"]
for kind in ("foreach", "fused"):
    for build in (lambda: mlp((1, 8, 8), 10), lambda: LlamaForCausalLM(LLAMA)):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **{kind: True})
        before = dict(model.named_parameters())
        for name, style in (shipped_plan(model, 1)[0] or {"1": "colwise", "3": "rowwise"}).items():
            divide(model.get_submodule(name), style, group)
        model.to(DEVICE)
        exchange_weights(optimizer, {weight: model.get_parameter(name) for name, weight in before.items()})
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {DEVICE.type}
        if isinstance(model, LlamaForCausalLM):
            loss = model(torch.zeros(2, 8, dtype=torch.long, device=DEVICE)).logits.float().square().mean()
        else:
            loss = model(torch.ones(2, 1, 8, 8, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        assert len(optimizer.param_groups) == 2  # DTensors and plain tensors
dist.destroy_process_group()
