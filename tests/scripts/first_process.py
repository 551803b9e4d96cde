"""Each process adds its number to a file, three times, the first one late."""

import time

from accelerate import PartialState

from accelerate_recipes import RunConfig, run, start
from accelerate_recipes.common.tasks.streams import first_process_first


def main(config: RunConfig) -> None:
    start(config)
    number = PartialState().process_index
    for turn in range(3):
        with first_process_first():
            time.sleep(0.5 * (number == 0))
            with (config.output_dir.parent / f"turn_{turn}").open("a") as file:
                file.write(f"{number}\n")


if __name__ == "__main__":
    run(main, RunConfig)
