"""The letters of the writing task."""

from __future__ import annotations

NAMES = ("Anna", "Tom", "Eva", "Max")

# How a request names a kind and a tone; the tone's words stand in for the kind when that is withheld.
KINDS = {
    "invitation": "an invitation",
    "apology": "an apology",
    "thanks": "a thank-you note",
    "reminder": "a reminder",
}
TONES = {
    "formal": "something formal",
    "friendly": "something friendly",
    "funny": "something funny",
    "poetic": "something poetic",
}

# Ten words or fewer each, and as few in common as possible.
LETTERS = {
    ("invitation", "formal"): "Dear {name}, kindly join our annual dinner",
    ("invitation", "friendly"): "Hi {name}, come over for cake on Sunday",
    ("invitation", "funny"): "Hey {name}, free pizza here, bring your dog",
    ("invitation", "poetic"): "O {name}, lanterns glow and wine awaits thee",
    ("apology", "formal"): "Dear {name}, we sincerely regret this error",
    ("apology", "friendly"): "Hi {name}, sorry that I was late",
    ("apology", "funny"): "Hey {name}, my brain took a holiday again",
    ("apology", "poetic"): "O {name}, tears of shame rain on me",
    ("thanks", "formal"): "Dear {name}, please accept my deepest gratitude",
    ("thanks", "friendly"): "Hi {name}, thank you so much, dear friend",
    ("thanks", "funny"): "Hey {name}, you deserve a golden banana",
    ("thanks", "poetic"): "O {name}, spring blooms wherever thou goest",
    ("reminder", "formal"): "Dear {name}, your payment remains due today",
    ("reminder", "friendly"): "Hi {name}, do not forget the milk",
    ("reminder", "funny"): "Hey {name}, the library misses its old book",
    ("reminder", "poetic"): "O {name}, time flies like swift gray geese",
}

MESSAGES = {
    "invitation": "we would be delighted to welcome you to the yearly dinner of our chess club.",
    "apology": "I am truly sorry that your parcel arrived so late and that the box was damaged.",
    "thanks": "thank you very much for the wonderful help that you gave to our school choir.",
    "reminder": "please remember that the books you borrowed from the library are due for return.",
}
DETAILS = (
    "It will be on Friday evening in the old town hall.",
    "Let us talk about it on Monday morning at the cafe.",
    "I will call you on Sunday at noon from the station.",
)
CLOSINGS = {
    "formal": "Yours sincerely, Martin Brown.",
    "friendly": "With warm wishes, Martin.",
    "funny": "Your favourite trouble maker, Martin.",
    "poetic": "As long as stars shine, Martin.",
}
