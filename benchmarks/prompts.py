"""Short beginnings of Python files, written for this benchmark; none is in the training text."""

PROMPTS = (
    "def merge_intervals(intervals):\n    result = []\n    for",
    "class TokenBucket:\n    def __init__(self, rate, capacity):\n        self.rate = rate\n",
    "import argparse\nimport json\n\n\ndef load_settings(path):\n    with open(path) as handle:\n",
    "class LinkedList:\n    def __init__(self):\n        self.head = None\n\n    def append(self, value):\n",
    "def moving_average(values, window):\n    if window < 1:\n        raise ValueError(",
    "import unittest\n\n\nclass TestStack(unittest.TestCase):\n    def setUp(self):\n        self.stack = []\n\n    def ",
    "def render_table(rows, columns):\n    widths = [max(len(str(row[c])) for row in rows) for c in columns]\n",
    'class RetryPolicy:\n    """How often a failed call is made again."""\n\n    def __init__(self, attempts=3):\n',
)
