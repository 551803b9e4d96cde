"""The recipes and scripts that tests run, and their flags."""

from accelerate_recipes.matrix import EXPERTS, MATRIX, SIZES, Cell
from support.runs import ROOT

MNIST = "recipes/mnist.py"
LINEAR = "recipes/linear_regression.py"
TRANSFORMER = "recipes/transformer.py"
TEXT_CLASSIFICATION = "recipes/text_classification.py"
TOKEN_CLASSIFICATION = "recipes/token_classification.py"
MASKED_LM = "recipes/masked_lm.py"
EMBEDDINGS = "recipes/embeddings.py"
QUESTION_ANSWERING = "recipes/question_answering.py"
TRANSLATION = "recipes/translation.py"
FINETUNE = "recipes/finetune.py"
DIFFUSION = "recipes/diffusion.py"
IMAGE_CLASSIFICATION = "recipes/image_classification.py"
SEGMENTATION = "recipes/segmentation.py"
DETECTION = "recipes/detection.py"
SPEECH = "recipes/speech.py"
DISTILLATION = "recipes/distillation.py"
PREFERENCES = "recipes/preferences.py"
VISION_LANGUAGE = "recipes/vision_language.py"
DISTURBED = "tests/scripts/disturbed.py"
MISFIT = "tests/scripts/misfit.py"
FOREACH = "tests/scripts/foreach.py"
HELD = "tests/scripts/held.py"
LOADED = "tests/scripts/loaded.py"
SAME_SAMPLES = "tests/scripts/same_samples.py"
USERS = "tests/users/recipe.py"

FLOAT32_CONFIGS = [
    "single",
    "ddp",
    "ddp_fp16",  # without a GPU it prints a line and runs in float32
    "fsdp2",
    "hsdp",
    "tensor_parallel",
    "fsdp2_tensor_parallel",
    "hsdp_tensor_parallel",
    "sequence_parallel",
    "fsdp2_sequence_parallel",
    "fsdp2_expert_parallel",
    "pipeline_parallel",
    "fsdp2_pipeline",
    "fsdp2_tensor_pipeline",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "deepspeed_zero3_offload",
]
BF16_CONFIGS = ["ddp_bf16", "fsdp2_bf16", "deepspeed_zero2_bf16"]
MULTI_NODE_CONFIGS = ["multi_node_ddp", "multi_node_hsdp", "multi_node_deepspeed_zero3"]

# 20 steps without dropout. With cosine the learning rate differs at each step.
STEPS = "--max_steps 20 --log_every 1 --eval_every 10 --lr_schedule cosine --warmup_steps 3 --learning_rate 1e-2 "
TEXT = f"--data {ROOT / 'LICENSE'} --context 32 --batch_size 16 --num_layers 2 --hidden_size 64 --sample_tokens 0"
# At three times this rate and with other texts, a weight with a gradient of nearly zero differed by 1.4e-5: Adam
# amplifies such a gradient together with its rounding error.
TEXT += " --learning_rate 1e-3"
# Sentences of docs/: with their pages, cut in two, with questions. The embedded data are large, and take seconds.
ENCODER = "--vocabulary 512 --max_length 32 --hidden_size 32 --batch_size 16 --learning_rate 1e-3 --eval_every 20"
CLASSES = f"--data {ROOT}/tests/data/texts.csv {ENCODER}"
TAGS = f"--data {ROOT}/tests/data/tags.conll {ENCODER} --max_length 64"
PAIRS = f"--data {ROOT}/tests/data/pairs.csv {ENCODER} --temperature 0.2"
QUESTIONS = f"--data {ROOT}/tests/data/questions.jsonl {ENCODER} --stride 8"
TRANSLATIONS = f"--data {ROOT}/tests/data/pairs.csv --source_column query --target_column document --max_length 32 "
TRANSLATIONS += "--max_target_length 8 --hidden_size 32 --batch_size 16 --learning_rate 1e-3 --eval_every 20"
CHATS = "--max_length 96 --batch_size 8 --learning_rate 1e-3 --eval_every 20 --num_answers 0"
IMAGES = "--hidden_size 32 --num_layers 2 --batch_size 32 --learning_rate 1e-3 --eval_every 20 --num_pictures 0"
SHAPES = "--image_size 16 --patch_size 8 --hidden_size 32 --num_layers 2 --batch_size 32 --learning_rate 1e-3 "
SHAPES += "--eval_every 20"
BOXES = "--hidden_size 32 --num_layers 2 --batch_size 16 --learning_rate 1e-3 --eval_every 20"
TONES = "--hidden_size 32 --batch_size 16 --learning_rate 1e-3 --eval_every 20"
MASKS = "--hidden_size 16 --batch_size 16 --learning_rate 1e-3 --eval_every 20"
RECIPES = {
    "mnist cnn": (MNIST, STEPS),
    "mnist mlp": (MNIST, STEPS + "--model mlp"),
    "linear regression": (LINEAR, STEPS),
    "transformer": (TRANSFORMER, STEPS + TEXT),
    "experts": (TRANSFORMER, STEPS + TEXT + " --num_experts 4"),
    "text classification": (TEXT_CLASSIFICATION, STEPS + CLASSES),
    "token classification": (TOKEN_CLASSIFICATION, STEPS + TAGS),
    "masked lm": (MASKED_LM, STEPS + f"--data {ROOT / 'LICENSE'} {ENCODER}"),
    "embeddings": (EMBEDDINGS, STEPS + PAIRS),
    "question answering": (QUESTION_ANSWERING, STEPS + QUESTIONS),
    "translation": (TRANSLATION, STEPS + TRANSLATIONS),
    "finetune": (FINETUNE, STEPS + CHATS),
    "diffusion": (DIFFUSION, STEPS + IMAGES),
    "distillation": (DISTILLATION, STEPS + CHATS),
    "preferences": (PREFERENCES, STEPS + CHATS),
    "image classification": (IMAGE_CLASSIFICATION, STEPS + SHAPES),
    "segmentation": (SEGMENTATION, STEPS + MASKS),
    "detection": (DETECTION, STEPS + BOXES),
    "speech": (SPEECH, STEPS + TONES),
    "vision language": (VISION_LANGUAGE, STEPS + CHATS),
}
# Flags that a config needs beside its file.
FLAGS = {config: f" {' '.join(flags)}" for config, flags in SIZES.items()}
NAMES = {"mnist cnn": "mnist", "mnist mlp": "mnist --model mlp", "experts": EXPERTS}  # in the table


def cell(recipe: str, config: str) -> Cell:
    """What the table of recipes and configs says of one of RECIPES."""
    return MATRIX.get((NAMES.get(recipe, recipe.replace(" ", "_")), config), Cell())


def result_of(verdict: str) -> str:
    """What a row of a certificate says, in the words of the table."""
    if verdict.startswith(("same", "bit for bit")):
        return "same"
    return "differs" if verdict.startswith("DIFFERS") else verdict.partition(":")[0]


# DISTURBED has 4 steps per epoch, a record every 3 steps and an evaluation every 4, so that most resumes are in the
# middle of an epoch.
COURSE = "--max_steps 14 --save_every 3"
LATEST = "--resume_from_checkpoint latest"
