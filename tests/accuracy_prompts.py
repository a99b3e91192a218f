"""Makes the prompts that `kvferry bench accuracy` comes with; all of them are our own words.

    python tests/accuracy_prompts.py > src/kvferry/bench/accuracy/prompts.jsonl

Short ones ask for what a small model knows, lists and tables for what is in the prompt; stories, code and logs go on.
"""

# ruff: noqa: E501, RUF001  (texts, some of them Cyrillic)
from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

FACTS = (
    ("The capital of France is", "Paris"),
    ("The capital of Italy is", "Rome"),
    ("The capital of Japan is", "Tokyo"),
    ("The capital of Spain is", "Madrid"),
    ("The largest planet of the solar system is", "Jupiter"),
    ("Water is made of hydrogen and", "oxygen"),
    ("A week has seven days, and a year has twelve", "months"),
    ("The opposite of hot is", "cold"),
    ("The first day of the week after Sunday is", "Monday"),
    ("Bees make", "honey"),
    ("The sun rises in the", "east"),
    ("Two plus two is", "four"),
    ("A spider has eight", "legs"),
    ("In winter the river freezes, because the water is too", "cold"),
    ("The language that is spoken in Germany is", "German"),
    ("The moon goes around the", "earth"),
)
LEAD = "Short notes for a pub quiz in a harbour town, each with one word at its end. "
LANGUAGES = {
    "german": (
        "Die Fähre legt jeden Morgen um sechs Uhr ab. Der Kapitän zählt die Wagen, die Matrosen lösen die Leinen, und langsam "
        "gleitet das Schiff über den grauen Fluss. Wer zu spät kommt, muss bis",
        " zum Mittag warten.",
    ),
    "french": (
        "Le bac traverse la rivière toutes les heures. Le passeur connaît chaque banc de sable, et il raconte aux voyageurs les "
        "histoires du vieux pont qui s'est effondré pendant la grande crue. Ce matin, il",
        " est arrivé en retard.",
    ),
    "spanish": (
        "El barquero vive junto al río desde hace cuarenta años. Por la mañana lleva a los niños a la escuela, y por la tarde los "
        "trae de vuelta a casa. Cuando hay niebla, toca una campana para que",
        " los demás lo oigan.",
    ),
    "italian": (
        "Il traghetto parte dal molo vecchio. A bordo ci sono due camion, una bicicletta e un cane che dorme vicino al timone. "
        "Il mare è calmo, ma il capitano guarda le nuvole e dice che",
        " presto pioverà.",
    ),
    "portuguese": (
        "A balsa leva pessoas e mercadorias para a outra margem. O preço é baixo, a viagem é curta, e o rio é largo. Às vezes, no "
        "inverno, a balsa não pode sair porque",
        " o vento é forte demais.",
    ),
    "polish": (
        "Prom odpływa o świcie. Na pokładzie stoi stary człowiek z walizką i patrzy na drugi brzeg, gdzie czeka na niego brat. "
        "Rzeka jest spokojna, a w oddali słychać",
        " dzwony kościoła.",
    ),
    "dutch": (
        "De pont vaart van de stad naar het eiland. In de zomer staan er lange rijen fietsen op de kade, in de winter alleen de "
        "postbode en een paar boeren. De schipper kent",
        " iedereen bij naam.",
    ),
    "japanese": ("渡し船は毎朝六時に出る。船頭は川の流れをよく知っていて、霧の日でも迷わない。今日は", "天気がいい。"),
    "chinese": ("渡船每天早上六点出发。船夫认识每一位乘客,也知道河里的每一块石头。今天早上,", "天气很好。"),
    "russian": (
        "Паром уходит каждый час. Паромщик знает реку с детства и рассказывает пассажирам о старом мосте, который унесло "
        "наводнением. Сегодня утром",
        " туман был густым.",
    ),
    "arabic": (
        "تغادر العبارة كل صباح في الساعة السادسة. يعرف الربان النهر جيدا ويحكي للركاب قصصا عن الجسر القديم. اليوم",
        " الطقس جميل.",
    ),
    "hindi": (
        "नाव हर सुबह छह बजे चलती है। नाविक नदी को अच्छी तरह जानता है और यात्रियों को पुराने पुल की कहानी सुनाता है। आज",
        " मौसम अच्छा है।",
    ),
}
PLACES = ("Oslo", "Porto", "Genoa", "Izmir", "Varna", "Bergen", "Galway", "Split", "Tromso", "Malmo", "Haifa", "Cadiz")
GOODS = (
    "lanterns",
    "ropes",
    "barrels",
    "clocks",
    "letters",
    "lamps",
    "apples",
    "sails",
    "anchors",
    "violins",
    "maps",
    "coats",
)
NAMES = ("Ada", "Bruno", "Clara", "Dario", "Edda", "Felix", "Greta", "Hugo", "Ines", "Jonas", "Katja", "Leo")
SENTENCES = (
    "{a} came down to the landing before the sun was up, and the river lay as still as glass.",
    "Nobody in {p} had seen {b} since the flood, but a light burned in the window of the ferry house.",
    "They loaded {n} {g} on the deck and covered them with a cloth that smelled of tar.",
    '"If the wind turns," said {b}, "we shall not reach {p} before night."',
    "{a} counted the {g} twice and came to {n} both times, which was one too few.",
    "The bell on the far bank rang three times, which meant that somebody wanted to cross.",
    "In the afternoon it rained, and {b} told the story of the ferryman who rowed all the way to {p}.",
    "{a} did not believe a word of it, but wrote everything down in a small green book.",
    "Late in the evening a boy brought a letter from {p}, with a seal that {b} knew well.",
    "The water rose by two hands, then by three, and the lower landing disappeared.",
    "{b} tied the boat to the old oak and went to sleep among the {g}.",
    "When {a} woke up, the boat was gone, and so were {n} of the {g}.",
)
CODE = (
    (
        "python",
        'def crossing_time(width_m, speed, current=0.0):\n    """Seconds that a ferry takes across a river."""\n'
        '    if speed <= current:\n        raise ValueError("the current is too strong")\n'
        "    return width_m / (speed ** 2 - current ** 2) ** 0.5\n\n\ndef fare(passengers, cars, is_night=False):\n"
        '    """Euros for a crossing."""\n    total = 2.5 * passengers + 9.0 * cars\n    if is_night:\n        total *= 1.5\n',
        "    return total\n",
    ),
    (
        "go",
        "package ferry\n\n// Queue holds the cars that wait at a landing.\ntype Queue struct {\n\tcars []string\n}\n\n"
        "func (q *Queue) Add(car string) {\n\tq.cars = append(q.cars, car)\n}\n\nfunc (q *Queue) Len() int {\n\treturn",
        " len(q.cars)\n}\n",
    ),
    (
        "sql",
        "CREATE TABLE crossings (id INTEGER PRIMARY KEY, ferry TEXT, departed_at TEXT, passengers INTEGER);\n"
        "-- How many passengers each ferry has carried, most first.\nSELECT ferry, SUM(passengers) AS total\nFROM crossings\nGROUP BY",
        " ferry\nORDER BY total DESC;\n",
    ),
    (
        "rust",
        "/// A boat and what it carries.\nstruct Boat {\n    name: String,\n    load_kg: u32,\n    limit_kg: u32,\n}\n\nimpl Boat {\n"
        "    fn has_room_for(&self, kg: u32) -> bool {\n        self.load_kg + kg <=",
        " self.limit_kg\n    }\n}\n",
    ),
)


def facts() -> Iterator[dict[str, str]]:
    for number, (question, answer) in enumerate(FACTS):
        yield {"name": f"fact-{number}", "prompt": question, "reference": f" {answer}.", "answer": answer}
        others = [pair for pair in FACTS if pair[0] != question][:6]
        shots = LEAD + " ".join(f"{asked} {known}." for asked, known in others)
        yield {"name": f"quiz-{number}", "prompt": f"{shots} {question}", "reference": f" {answer}.", "answer": answer}


def languages() -> Iterator[dict[str, str]]:
    for name, (prompt, reference) in LANGUAGES.items():
        yield {"name": f"language-{name}", "prompt": prompt, "reference": reference}


def registers() -> Iterator[dict[str, str]]:
    """Which line is asked for stands anywhere in the prompt."""
    for number, num_lines in enumerate(
        (4, 6, 8, 12, 16, 24, 32, 32, 48, 48, 64, 64, 96, 96, 128, 160, 200, 330, 5, 10, 20, 40)
    ):
        dice = random.Random(f"register {number}")
        crates = dice.sample(range(100, 1000), num_lines)
        rows = [(crate, dice.randint(2, 99), dice.choice(GOODS), dice.choice(PLACES)) for crate in crates]
        lines = [f"Crate {crate} holds {count} {goods} for {place}." for crate, count, goods, place in rows]
        crate, count, goods, place = dice.choice(rows)
        prompt = "The register of the ferry, crate by crate.\n" + "\n".join(lines) + f"\nOnce more, crate {crate} holds"
        yield {
            "name": f"register-{num_lines}-{number}",
            "prompt": prompt,
            "reference": f" {count} {goods} for {place}.",
            "answer": f"{count} {goods}",
        }


def tables() -> Iterator[dict[str, str]]:
    for number, num_rows in enumerate((5, 10, 20, 40, 80, 120)):
        dice = random.Random(f"table {number}")
        rows = [
            (
                f"{hour:02d}:{dice.randrange(0, 60, 5):02d}",
                dice.choice(PLACES),
                dice.choice(NAMES),
                dice.randint(10, 300),
            )
            for hour in sorted(dice.choices(range(5, 23), k=num_rows))
        ]
        text = "\n".join(f"| {at} | {place} | {captain} | {people} |" for at, place, captain, people in rows)
        at, place, captain, people = rows[0]
        head = "| departs | to | captain | passengers |\n|---|---|---|---|\n"
        prompt = f"Departures of the day:\n\n{head}{text}\n\nThe first ferry of the day departs at {at} to"
        yield {
            "name": f"table-{num_rows}",
            "prompt": prompt,
            "reference": f" {place} with captain {captain} and {people} passengers.",
            "answer": place,
        }


def stories() -> Iterator[dict[str, str]]:
    for number, num_sentences in enumerate((2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 100, 130, 180, 230)):
        dice = random.Random(f"story {number}")
        said = [
            dice.choice(SENTENCES).format(
                a=dice.choice(NAMES),
                b=dice.choice(NAMES),
                p=dice.choice(PLACES),
                g=dice.choice(GOODS),
                n=dice.randint(2, 40),
            )
            for _ in range(num_sentences + 1)
        ]
        yield {"name": f"story-{num_sentences}", "prompt": " ".join(said[:-1]), "reference": f" {said[-1]}"}


def code() -> Iterator[dict[str, str]]:
    for name, prompt, reference in CODE:
        yield {"name": f"code-{name}", "prompt": prompt, "reference": reference}
    for number, (name, prompt, reference) in enumerate(CODE):
        others = "\n\n".join(
            f"# file {place}\n{each[1]}{each[2]}" for place, each in enumerate(CODE * 3) if each[0] != name
        )
        yield {"name": f"files-{number}", "prompt": f"{others}\n\n# the last file\n{prompt}", "reference": reference}


def logs() -> Iterator[dict[str, str]]:
    for number, num_lines in enumerate((6, 20, 60, 150)):
        dice = random.Random(f"log {number}")
        lines = [
            json.dumps(
                {
                    "at": f"2026-03-{1 + place // 24:02d}T{place % 24:02d}:00:00Z",
                    "boat": dice.choice(NAMES).lower(),
                    "event": dice.choice(("departed", "arrived", "delayed")),
                    "load": dice.randint(0, 100),
                }
            )
            for place in range(num_lines + 1)
        ]
        cut = len(lines[-1]) // 2
        yield {
            "name": f"log-{num_lines}",
            "prompt": "\n".join([*lines[:-1], lines[-1][:cut]]),
            "reference": lines[-1][cut:],
        }


def sums() -> Iterator[dict[str, str]]:
    for number, num_shots in enumerate((3, 5, 8, 12, 20, 30, 60, 90)):
        dice = random.Random(f"sums {number}")
        pairs = [(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(num_shots + 1)]
        lines = [f"{one} passengers and {other} more are {one + other} passengers." for one, other in pairs]
        one, other = pairs[-1]
        prompt = "\n".join([*lines[:-1], f"{one} passengers and {other} more are"])
        yield {
            "name": f"sum-{num_shots}",
            "prompt": prompt,
            "reference": f" {one + other} passengers.",
            "answer": f"{one + other} ",
        }


def items() -> list[dict[str, Any]]:
    return [*facts(), *languages(), *code(), *tables(), *registers(), *stories(), *logs(), *sums()]


def text() -> str:
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items())


if __name__ == "__main__":
    print(text(), end="")
