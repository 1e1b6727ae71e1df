"""What the flow policy is told in training: the demo's phrases, other wordings of the same, and words around them.

The wordings that the judge keeps for its harder level are none of these (test_flow_train.py).
"""

from __future__ import annotations

import demo  # noqa: F401
import numpy as np
from phrases import CHATTY, GROUPS, PHRASES, UNSEEN

MORE = {
    "keep": [
        "stay where you are in your lane",
        "keep driving straight",
        "remain in the present lane",
        "no lane change",
        "drive on in this lane",
        "follow the lane you are in",
        "stay between the lines",
        "keep the lane and the speed",
    ],
    "left": [
        "switch to the left lane",
        "get over to the left lane",
        "get into the left lane",
        "move over to the left side",
        "continue in the left lane",
        "pull over to the left lane",
        "take the lane on the far left",
        "steer to the left lane",
    ],
    "right": [
        "switch to the right lane",
        "get over to the right lane",
        "get into the right lane",
        "move over to the right side",
        "continue in the right lane",
        "pull over to the right lane",
        "take the lane on the far right",
        "steer to the right lane",
    ],
    "overtake": [
        "overtake the orange car",
        "pass the orange vehicle ahead",
        "get ahead of the slow car",
        "drive past the slow vehicle",
        "overtake the vehicle in front of you",
        "leave the slow car behind",
        "pass the car ahead of you",
        "drive around the orange car",
    ],
    "follow": [
        "stay behind the slow car",
        "keep behind the car in front",
        "follow the vehicle ahead at low speed",
        "drive behind the orange car",
        "lower your speed",
        "brake and follow the car",
        "drive at low speed",
        "match the speed of the slow car",
    ],
    "fast": [
        "go as fast as you can",
        "increase the speed",
        "drive more quickly",
        "speed up now and drive fast",
        "go at full speed",
        "step on the gas",
        "drive quickly",
        "raise your speed",
    ],
}
BEFORE = [
    "please",
    "now",
    "you should",
    "robot,",
    "car,",
    "ok,",
    "next,",
    "I want you to",
    "could you",
]
AFTER = ["please", "now", "when it is safe", "carefully", "at once", "if you can", "thanks"]
IDLE = [
    "the sky is blue",
    "it is a sunny day",
    "the radio is on",
    "we have a lot of time",
    "the road has three lanes",
    "it may rain later",
    "the passenger is asleep",
    "the tank is full",
    "my phone is ringing",
    "lunch is at noon",
]


KEPT = {
    text for said in (UNSEEN, CHATTY) for texts in said.values() for text in texts
}  # for the judge


def sentence(group: str, rng: np.random.Generator) -> str:
    """A wording of the group; half of them are the demo's own phrases and nothing else. Never one of KEPT."""
    while True:
        text = _sentence(group, rng)
        if text.lower().rstrip(".") not in KEPT:
            return text


def _sentence(group: str, rng: np.random.Generator) -> str:
    text: str = PHRASES[group][rng.integers(len(PHRASES[group]))]
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.7:
        text = MORE[group][rng.integers(len(MORE[group]))]
    if rng.random() < 0.3:
        text = f"{BEFORE[rng.integers(len(BEFORE))]} {text}"
    if rng.random() < 0.3:
        text = f"{text} {AFTER[rng.integers(len(AFTER))]}"
    if rng.random() < 0.25:
        idle = IDLE[rng.integers(len(IDLE))]
        text = f"{text}, {idle}" if rng.random() < 0.5 else f"{idle}, {text}"
    if rng.random() < 0.1:
        words = text.split(" ")
        words.insert(int(rng.integers(len(words) + 1)), "the")
        text = " ".join(words)
    if rng.random() < 0.15:
        text = text.capitalize()
    if rng.random() < 0.15:
        text += "."
    return text


def corpus(lines: int = 20000, seed: int = 1) -> list[str]:
    """For a tokenizer."""
    rng = np.random.default_rng(seed)
    return [sentence(GROUPS[rng.integers(6)], rng) + "\n" for _ in range(lines)]
