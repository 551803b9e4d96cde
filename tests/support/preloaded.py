"""Imports the modules of recipes once, for all runs that are forked from this process."""

import gc
import multiprocessing
import os
from importlib import import_module
from pathlib import Path

MODULES = """
    accelerate.commands.launch
    accelerate.utils.deepspeed
    accelerate_recipes.common.loop
    accelerate_recipes.common.run
    accelerate_recipes.common.tasks.vision.images
    accelerate_recipes.common.tasks.chat.chat_models
    accelerate_recipes.common.tasks.nlp.labelled_texts
    accelerate_recipes.common.tasks.reading.sources
    accelerate_recipes.common.tasks.nlp.text
    accelerate_recipes.common.tasks.models.causal_lm
    accelerate_recipes.common.tasks.models.encoder
    accelerate_recipes.common.tasks.chat.preferences
    accelerate_recipes.common.tasks.metrics.similarity
    accelerate_recipes.common.tasks.chat.vision_chats
    datasets
    deepspeed.launcher.runner
    deepspeed.ops.adam
    deepspeed.ops.op_builder.all_ops
    deepspeed.runtime.engine
    deepspeed.runtime.superoffload.superoffload_stage3
    deepspeed.runtime.zero.muon.muon_optimizer
    deepspeed.runtime.zero.stage3
    peft
    torch.distributed.pipelining
    torch.distributed.run
    torch.distributed.tensor
    torch.utils.cpp_extension
    transformers.models.bert.modeling_bert
    transformers.models.llama.modeling_llama
"""

MAIN_PROCESS = multiprocessing.current_process()  # a fork uses it to look like a main process

path = os.environ.pop("PYTHONPATH").partition(os.pathsep)[2]
if path:
    os.environ["PYTHONPATH"] = path
os.environ["DS_ACCELERATOR"] = "cpu"  # as `start` sets it before the first import of deepspeed
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # else jemalloc, in pyarrow, may start a thread
for name in MODULES.split():
    import_module(name)
del os.environ["DS_ACCELERATOR"], os.environ["JE_ARROW_MALLOC_CONF"]

# A fork may wait forever for a lock that a second thread holds at that moment.
num_threads = len(list(Path("/proc/self/task").iterdir()))
assert num_threads == 1, f"{num_threads} threads after the imports: expected 1, because forks are not safe with more"

gc.collect()
gc.freeze()  # else each garbage collection in a fork writes to the imported objects, and so copies them
