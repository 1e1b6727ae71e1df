"""Instruction groups and their paraphrases."""

GROUPS = ["keep", "left", "right", "overtake", "follow", "fast"]
PHRASES = {
    "keep": [
        "keep your lane",
        "stay in this lane",
        "keep going in the current lane",
        "do not change lanes",
        "hold the lane",
        "continue straight ahead",
    ],
    "left": [
        "change to the left lane",
        "move to the left lane",
        "go to the left lane",
        "take the left lane",
        "merge left",
        "drive in the leftmost lane",
    ],
    "right": [
        "change to the right lane",
        "move to the right lane",
        "go to the right lane",
        "take the right lane",
        "merge right",
        "drive in the rightmost lane",
    ],
    "overtake": [
        "overtake the slow car",
        "pass the slow car",
        "get past the orange car",
        "overtake the car ahead",
        "go around the slow vehicle",
        "pass the car in front",
    ],
    "follow": [
        "slow down and follow",
        "follow the car ahead slowly",
        "slow down",
        "follow the slow car",
        "reduce speed and stay behind",
        "drive slowly",
    ],
    "fast": [
        "drive fast",
        "speed up",
        "go faster",
        "accelerate",
        "drive at high speed",
        "hurry up",
    ],
}
