"""recipes/vision_language.py with the processors of SmolVLM and Qwen-VL on machines without torchvision: no videos."""

from accelerate_recipes import run
from recipes.vision_language import Config, main
from support.vision_models import without_videos

if __name__ == "__main__":
    without_videos()
    run(main, Config)
