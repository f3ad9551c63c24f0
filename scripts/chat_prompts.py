"""Two hundred chats of two turns, each answer with rules that a program can check.

Five kinds of request over forty subjects each. None of it stands among the prompts that the package
has a source answer for calibration: a test compares their 13-grams.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Rule = Callable[[str], bool]
_COMMON = {
    "the", "a", "an", "of", "to", "and", "in", "is", "it", "for", "that", "with", "as", "are",
    "on", "be", "you", "your", "this", "can", "or", "by", "from", "at", "which",
}  # fmt: skip
_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)]|\*\*)", re.MULTILINE)


@dataclass(frozen=True)
class Turn:
    """A request.

    Attributes:
        text: what the user says.
        rules: what the answer must keep, by their names.
    """

    text: str
    rules: dict[str, Rule]


def words(text: str) -> list[str]:
    """Lower-case words."""
    return re.findall(r"[a-z0-9']+", text.lower())


def mentions(*any_of: str) -> dict[str, Rule]:
    """One of these is in the answer."""
    return {"mentions " + "/".join(any_of): lambda text: any(w in text.lower() for w in any_of)}


def at_most(count: int) -> dict[str, Rule]:
    """No more words than that."""
    return {f"at most {count} words": lambda text: len(words(text)) <= count}


def at_least(count: int) -> dict[str, Rule]:
    """No fewer words than that."""
    return {f"at least {count} words": lambda text: len(words(text)) >= count}


def items(count: int) -> dict[str, Rule]:
    """A list of so many entries at least."""
    return {f"{count} items": lambda text: len(_ITEM.findall(text)) >= count}


ENGLISH: dict[str, Rule] = {
    "English": lambda text: sum(w in _COMMON for w in words(text)) >= 0.15 * len(words(text))
}

DEFINED = [
    ("gravity", "mass|force|pull|attract"), ("a volcano", "magma|lava|erupt|mountain"),
    ("democracy", "people|vote|government"), ("an algorithm", "steps|instructions|procedure|rules"),
    ("oxygen", "gas|breath|element|air"), ("a glacier", "ice|snow"),
    ("a novel", "book|story|fiction|narrative"), ("a planet", "orbit|star|sun|celestial"),
    ("friction", "surface|force|motion|resist"), ("a computer program", "instructions|code|task"),
    ("an earthquake", "ground|shak|crust|plates|seismic"), ("a vitamin", "nutrient|health|body"),
    ("evolution", "species|change|time|natural"), ("a museum", "art|collection|history|exhibit"),
    ("a market economy", "supply|price|goods|demand"), ("an insect", "legs|animal|arthropod"),
    ("a desert", "dry|rain|arid|water"), ("electricity", "energy|charge|electron|power"),
    ("a symphony", "music|orchestra"), ("honesty", "truth|honest"),
    ("a bridge", "structure|river|road|cross|span"), ("a database", "data|information"),
    ("the moon", "earth|satellite|orbit"), ("a forest", "trees|plants"),
    ("a fossil", "remains|rock|preserved|ancient"), ("a recipe", "ingredient|cook|food|dish"),
    ("a contract", "agreement|legal|parties"), ("a hurricane", "storm|wind|tropical"),
    ("an atom", "matter|proton|electron|nucleus|element"), ("a poem", "words|verse|poet|language"),
    ("recycling", "waste|materials|reuse|reus"), ("a battery", "energy|electric|power|store"),
    ("a river", "water|flow|stream"), ("meditation", "mind|focus|relax|breath"),
    ("a spreadsheet", "data|cells|rows|table|column"), ("a lighthouse", "light|ship|coast|sea"),
    ("a triangle", "three|sides|angles"), ("a whale", "mammal|ocean|marine|sea"),
    ("a passport", "travel|country|document|identity"), ("a thermometer", "temperature"),
]  # fmt: skip
ADVISED = [
    "learning to swim", "saving water at home", "growing tomatoes", "speaking in public",
    "keeping a desk tidy", "learning the guitar", "staying warm in winter", "cooking rice",
    "taking better photographs", "writing a diary", "training a dog", "saving money on food",
    "getting up early", "reading more books", "planning a birthday party", "cycling in the city",
    "drinking more water", "making new friends", "preparing for an exam", "looking after plants",
    "walking long distances", "using less plastic", "remembering names", "painting a room",
    "camping with children", "keeping a car clean", "learning vocabulary", "baking bread",
    "calming a crying baby", "working with headphones", "buying a used bicycle", "hosting guests",
    "typing faster", "sleeping on a train", "writing clear letters", "keeping hens",
    "drawing portraits", "travelling alone", "cleaning windows", "playing chess",
]  # fmt: skip
TOLD = [
    ("a fox in the city", "fox"), ("an old clock", "clock"), ("a girl and her kite", "kite"),
    ("a lost umbrella", "umbrella"), ("a robot that paints", "robot"), ("a night train", "train"),
    ("a boy who finds a map", "map"), ("two neighbours and a fence", "fence"),
    ("a wise owl", "owl"), ("a snowman in spring", "snow"), ("a ship in a bottle", "ship"),
    ("a baker and a mouse", "mouse"), ("a secret garden", "garden"), ("a brave rabbit", "rabbit"),
    ("a violin without strings", "violin"), ("a rainy market day", "rain"),
    ("a shy dragon", "dragon"), ("an empty theatre", "theatre|theater"),
    ("a red balloon", "balloon"), ("a farmer and the wind", "wind"), ("a river at night", "river"),
    ("a broken window", "window"), ("a cat on a roof", "cat"), ("a letter from the sea", "letter"),
    ("a tiny island", "island"), ("an astronaut who is homesick", "astronaut"),
    ("a wooden horse", "horse"), ("a bridge of glass", "bridge"), ("a sleepy bear", "bear"),
    ("a tree that talks", "tree"), ("a pair of blue shoes", "shoes"), ("a lantern", "lantern"),
    ("a forgotten song", "song"), ("a mountain village", "village|mountain"),
    ("a curious turtle", "turtle"), ("a king without a crown", "king"),
    ("a grandmother and her radio", "radio"), ("a city under water", "city"),
    ("a swan and a pond", "swan"), ("a street musician", "musician|music"),
]  # fmt: skip
CAPITALS = [
    ("France", "Paris", "Europe"), ("Japan", "Tokyo", "Asia"), ("Egypt", "Cairo", "Africa"),
    ("Italy", "Rome", "Europe"), ("Spain", "Madrid", "Europe"), ("Germany", "Berlin", "Europe"),
    ("Canada", "Ottawa", "America"), ("India", "Delhi", "Asia"), ("China", "Beijing", "Asia"),
    ("Russia", "Moscow", "Europe|Asia"), ("Greece", "Athens", "Europe"),
    ("Portugal", "Lisbon", "Europe"), ("Kenya", "Nairobi", "Africa"), ("Peru", "Lima", "America"),
    ("Norway", "Oslo", "Europe"), ("Sweden", "Stockholm", "Europe"), ("Cuba", "Havana", "America"),
    ("Poland", "Warsaw", "Europe"), ("Austria", "Vienna", "Europe"),
    ("Thailand", "Bangkok", "Asia"),
    ("Ireland", "Dublin", "Europe"), ("Argentina", "Buenos Aires", "America"),
    ("Chile", "Santiago", "America"), ("Mexico", "Mexico City", "America"),
    ("Hungary", "Budapest", "Europe"), ("Denmark", "Copenhagen", "Europe"),
    ("Finland", "Helsinki", "Europe"), ("Turkey", "Ankara", "Asia|Europe"),
    ("Belgium", "Brussels", "Europe"), ("Nigeria", "Abuja", "Africa"),
    ("Vietnam", "Hanoi", "Asia"), ("Iceland", "Reykjav", "Europe"),
    ("Ghana", "Accra", "Africa"), ("Ukraine", "Kyiv|Kiev", "Europe"),
    ("Colombia", "Bogot", "America"), ("Morocco", "Rabat", "Africa"),
    ("Iran", "Tehran", "Asia"), ("Nepal", "Kathmandu", "Asia"),
    ("Scotland", "Edinburgh", "Europe|Kingdom"), ("Indonesia", "Jakarta", "Asia"),
]  # fmt: skip
PROGRAMMED = [
    "adds two numbers", "multiplies three numbers", "returns the larger of two numbers",
    "counts the vowels of a string", "checks whether a number is even", "squares every item",
    "returns the last item of a list", "joins words with spaces", "sums a list of numbers",
    "finds the smallest number in a list", "turns a string into capitals", "counts words",
    "computes the area of a circle", "removes duplicates from a list", "reads a text file",
    "converts minutes to seconds", "checks whether a word is a palindrome", "rolls a die",
    "returns the length of a string", "subtracts one number from another",
    "computes the average of a list", "repeats a string", "prints the numbers from 1 to 10",
    "merges two lists", "swaps two values", "counts how often a letter occurs", "halves a number",
    "checks whether a list is empty", "returns the first character of a string",
    "computes the perimeter of a rectangle", "converts inches to centimetres",
    "returns the absolute value", "finds the longest word of a list", "greets a person by name",
    "checks whether a year is a leap year", "sorts a list of numbers", "splits a sentence",
    "raises a number to a power", "reverses a list", "rounds a number",
]  # fmt: skip


def chats() -> Iterator[tuple[str, tuple[Turn, Turn]]]:
    """All chats, each with the name of its kind."""
    for name, expected in DEFINED:
        first = Turn(
            f"In one or two sentences, what is {name}?",
            {**mentions(*expected.split("|")), **at_most(120), **ENGLISH},
        )
        second = Turn("Why does that matter to people?", {**at_least(8), **ENGLISH})
        yield "definition", (first, second)
    for subject in ADVISED:
        first = Turn(f"List three tips for {subject}.", {**items(3), **ENGLISH})
        second = Turn("Say more about the first tip.", {**at_least(12), **ENGLISH})
        yield "list", (first, second)
    for subject, expected in TOLD:
        first = Turn(
            f"Tell a very short story about {subject}.",
            {**mentions(*expected.split("|")), **at_least(25), **ENGLISH},
        )
        second = Turn("Which title would suit this story?", {**at_most(100), **at_least(1)})
        yield "story", (first, second)
    for country, capital, continent in CAPITALS:
        first = Turn(f"What is the capital of {country}?", mentions(*capital.lower().split("|")))
        second = Turn("On which continent is it?", mentions(*continent.lower().split("|")))
        yield "fact", (first, second)
    for task in PROGRAMMED:
        first = Turn(
            f"Write a Python function that {task}.",
            {**mentions("def "), **mentions("return", "print")},
        )
        second = Turn("Explain how this function works.", {**at_least(15), **ENGLISH})
        yield "code", (first, second)
