"""Write experiences.jsonl: made-up experiences through the recorder that `mps-trainer record` uses.

A fixed random direction decides which hidden states earn 1, and every twentieth reward is flipped (an outlier).
"""

import sys
from pathlib import Path

import numpy as np

from mps_trainer.operator.recording import Recorder
from mps_trainer.workbench import RecordedExperience, RecordedId

BATCHES, SIZE, WIDTH = 19, 40, 8


def main(path: Path) -> None:
    rng = np.random.default_rng(449)
    direction = rng.standard_normal(WIDTH)
    recorder = Recorder(path, BATCHES * SIZE)
    for batch in range(BATCHES):
        recorder.add([experience(batch, i, direction, rng) for i in range(SIZE)])
    recorder.close()


def experience(batch: int, i: int, direction: np.ndarray, rng: np.random.Generator) -> RecordedExperience:
    hidden_state = rng.standard_normal(WIDTH).round(2)
    flipped = bool(rng.random() < 0.05)
    reward = float((hidden_state @ direction > 0) != flipped)
    return RecordedExperience(
        eid=RecordedId(batch, i // 8, i % 8, 0, f"{i:x}"),
        tokens=rng.integers(0, 100, 4),
        prompt_length=2,
        reward=reward,
        info={"hidden_state": hidden_state, "flipped": int(flipped)},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("experiences.jsonl")))
