"""Instruction groups and their paraphrases.

PHRASES are those of training. UNSEEN and CHATTY never are: other wordings, and such with a courtesy or a remark around
them. The shipped policy knows only the words of its 36 phrases, so they are of those that it understands at all.
"""

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
UNSEEN = {
    "keep": [
        "hold this lane",
        "keep the lane",
        "keep to this lane",
        "continue in this lane",
        "stay in the current lane",
        "stay in your current lane",
    ],
    "left": [
        "merge to the left lane",
        "change lanes to the left",
        "drive in the left lane",
        "go to the leftmost lane",
        "merge into the left lane",
        "use the left lane",
    ],
    "right": [
        "merge to the right lane",
        "change lanes to the right",
        "drive in the right lane",
        "head for the right lane",
        "merge into the right lane",
        "use the right lane",
    ],
    "overtake": [
        "pass the car",
        "get past the slow car",
        "go past the slow car",
        "go around the orange car",
        "overtake the car in front",
        "go around the car ahead",
    ],
    "follow": [
        "reduce speed",
        "go slowly and stay behind",
        "go slowly and follow",
        "follow slowly behind",
        "reduce your speed",
        "follow the slow vehicle",
    ],
    "fast": [
        "go fast",
        "drive faster",
        "hurry",
        "go at high speed",
        "full speed",
        "hurry now",
    ],
}
CHATTY = {
    "keep": [
        "hey hold this lane",
        "i say hold this lane",
        "hold this lane today",
        "hold this lane at last",
        "car, keep to this lane",
        "so continue in this lane",
    ],
    "left": [
        "ok drive in the left lane",
        "so go to the leftmost lane",
        "car, change lanes to the left",
        "go to the leftmost lane, car",
        "now merge to the left lane",
        "drive in the left lane then",
    ],
    "right": [
        "yes, drive in the right lane",
        "hi, merge to the right lane",
        "driver, merge to the right lane",
        "i say drive in the right lane",
        "car, change lanes to the right",
        "merge to the right lane ok",
    ],
    "overtake": [
        "please pass the orange car",
        "hello overtake the orange car",
        "pass the car, thanks",
        "my car, go around the orange car",
        "driver, overtake the car in front",
        "pass the car in the end",
    ],
    "follow": [
        "please follow slowly",
        "yes, reduce speed",
        "go slowly thanks",
        "my car, go slowly",
        "hi, follow the slow vehicle",
        "hello go slowly",
    ],
    "fast": [
        "please drive faster",
        "it is late, go fast",
        "please hurry",
        "my car, hurry",
        "ok go fast",
        "you can go fast",
    ],
}
