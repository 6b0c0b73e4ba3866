"""Instructions in chats, to train a draft for a model that follows them, from Python's standard library and templates.

    python recipes/instructions.py DIR       # writes mixed.jsonl, and sql.jsonl with one narrow kind alone

Each line is a conversation whose last turn is the user's, as `outrider train data --prompts` reads them. Nothing comes from
a collection of questions that drafts are measured with. One version of Python writes the same lines each time.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

from library_files import library_files

#: Conversations of each file, and lines that a function in a prompt may have.
MIXED, NARROW = 6000, 3000
FEWEST_LINES, MOST_LINES = 5, 40

ABOUT_CODE = (
    "Explain what this Python function does.\n\n{code}",
    "Write a docstring for this function. Answer with the whole function.\n\n{code}",
    "Write unit tests for this function with pytest.\n\n{code}",
    "Add type hints to this function and change nothing else.\n\n{code}",
    "Are there bugs or edge cases in this code? Name them and correct the function.\n\n{code}",
    "Rewrite this function so that it is easier to read.\n\n{code}",
    "Translate this function to JavaScript.\n\n{code}",
)
ABOUT_WORDS = (
    "Write a Python function `{name}` that does the following: {words}",
    "Summarise this text in two sentences:\n\n{words}",
    "Translate this text to German:\n\n{words}",
    "Translate this text to French:\n\n{words}",
    "Rewrite this text for a reader who does not program:\n\n{words}",
    "What is `{name}` good for? Here is its documentation:\n\n{words}\n\nGive a short example.",
)
# fmt: off
TOPICS = (
    "tides", "bread", "glaciers", "the printing press", "vaccines", "chess openings", "jazz", "volcanoes",
    "bicycles", "the Roman senate", "photosynthesis", "earthquakes", "tea", "inflation", "black holes", "bees",
    "the Silk Road", "concrete", "haiku", "public libraries", "compilers", "hash tables", "TCP", "encryption",
    "garbage collection", "regular expressions", "version control", "databases", "caches", "unit tests",
    "recursion", "neural networks", "operating systems", "floating-point numbers", "sleep", "running",
    "a healthy breakfast", "saving money", "learning a language", "job interviews", "gardening",
    "moving to another city", "teamwork", "time management",
)
# fmt: on
ABOUT_TOPICS = (
    "What should a beginner know about {topic}?",
    "Write a short article about {topic} with three headings.",
    "List five facts about {topic} and explain each in one sentence.",
    "Write a letter to a friend about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Explain {topic} to a child.",
    "Compose a dialogue between a teacher and a pupil about {topic}.",
)
PEOPLE = ("Anna", "Bo", "Chen", "Dara", "Emil", "Fatima", "Goran", "Hana")
SUMS = (
    "{a} has {n} boxes with {m} pens each and gives {k} pens to {b}. How many pens does {a} have now?",
    "A train needs {n} minutes for {m} km. How far does it go in {k} minutes at the same speed?",
    "{a} earns {n} euros an hour and works {k} hours a day. How much does {a} earn in {m} days?",
    "{a} reads {n} pages on Monday and {k} pages more on each day that follows. How many pages are that in {m} days?",
    "A tank holds {n} litres. {k} litres run out in each hour, and {b} pours in {m} litres. What is left after two hours?",
)
TABLES = {
    "customers": ("id", "name", "city", "country", "created_at"),
    "orders": ("id", "customer_id", "total", "status", "ordered_at"),
    "items": ("id", "order_id", "product_id", "quantity", "price"),
    "products": ("id", "title", "category", "price", "stock"),
    "employees": ("id", "name", "department_id", "salary", "hired_at"),
    "departments": ("id", "name", "budget", "manager_id", "city"),
    "flights": ("id", "origin", "destination", "departs_at", "seats"),
    "bookings": ("id", "flight_id", "passenger", "price", "booked_at"),
}
ABOUT_TABLES = (
    "the {count} rows of {table} with the highest {column}",
    "how many rows of {table} there are for each {column}",
    "all rows of {table} whose {column} stands more than once",
    "the rows of {table} that have no row in {other}",
    "the average number of {table} for each row of {other}",
    "the newest row of {table} for each {column}",
    "each row of {table} with the matching row of {other}, sorted by {column}",
    "the share of each {column} among all rows of {table}",
)


def functions() -> list[tuple[str, str, str]]:
    """(name, source, documentation) of functions of the library that are neither short nor long."""
    found = []
    for held_out, _, text in library_files():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree) if not held_out else ():
            if isinstance(node, ast.FunctionDef) and FEWEST_LINES <= (node.end_lineno or 0) - node.lineno + 1 <= MOST_LINES:
                source = dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                found.append((node.name, source, " ".join((ast.get_docstring(node) or "").split())))
    return found


def statement(rng: random.Random) -> str:
    """A question that a statement of SQL answers, behind the tables that it is about."""
    table, other = rng.sample(sorted(TABLES), 2)
    tables = "\n".join(f"CREATE TABLE {name} ({', '.join(TABLES[name])});" for name in (table, other))
    wanted = rng.choice(ABOUT_TABLES).format(
        table=table, other=other, column=rng.choice(TABLES[table][1:]), count=rng.randrange(2, 20)
    )
    return f"{tables}\n\nWrite one statement of SQL that returns {wanted}."


def mixed(rng: random.Random) -> Iterator[str]:
    """Instructions without an end: most with code or its documentation, and some of other kinds."""
    every = functions()
    told = [each for each in every if 60 <= len(each[2]) <= 1200]

    def code() -> str:
        return rng.choice(ABOUT_CODE).format(code=f"```python\n{rng.choice(every)[1]}\n```")

    def words() -> str:
        name, _, documentation = rng.choice(told)
        return rng.choice(ABOUT_WORDS).format(name=name, words=documentation)

    def topic() -> str:
        return rng.choice(ABOUT_TOPICS).format(topic=rng.choice(TOPICS))

    def numbers() -> str:
        a, b = rng.sample(PEOPLE, 2)
        n, m, k = rng.randrange(20, 90), rng.randrange(3, 20), rng.randrange(2, 9)
        return rng.choice(SUMS).format(a=a, b=b, n=n, m=m, k=k)

    kinds: list[Callable[[], str]] = [code, code, code, words, words, topic, numbers, lambda: statement(rng)]
    while True:
        yield rng.choice(kinds)()


def write(path: Path, prompts: Iterator[str], count: int) -> None:
    """Writes so many different conversations of one turn."""
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen[next(prompts)] = None
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in chosen)
    path.write_text("".join(line + "\n" for line in lines), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    write(folder / "mixed.jsonl", mixed(rng), MIXED)
    write(folder / "sql.jsonl", iter(lambda: statement(rng), ""), NARROW)


if __name__ == "__main__":
    main()
