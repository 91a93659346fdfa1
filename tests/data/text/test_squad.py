"""SQuAD: places of tokens in odd texts, windows, and the official scores."""

import itertools
import json

import numpy as np
import pytest

from jaxdl.data.text.squad import normalized, open_squad, token_f1
from jaxdl.data.text.wordpiece import SPECIAL, from_vocabulary
from jaxdl.errors import ConfigError, DataError
from tests.data.text.corpora import LETTERS, TAILS, WORDS, vocabulary

TOKENIZER = vocabulary()
LETTER_TAILS = [f"##{letter}" for letter in LETTERS]
CASED = from_vocabulary([*SPECIAL, *LETTERS, *LETTER_TAILS, *(c.upper() for c in LETTERS)], lowercase=False)


@pytest.fixture
def opened(tmp_path):
    def make(content, tokenizer=TOKENIZER, **settings):
        path = tmp_path / "squad.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return open_squad(path, tokenizer, **{"length": 20, "stride": 4, "question_length": 5, **settings})

    return make


def squad(*paragraphs, **more):
    return {"version": "x", "data": [{"title": "t", "paragraphs": list(paragraphs)}], **more}


def paragraph(context, *questions):
    """A passage; a question is (id, text, answers), an answer a text or (text, answer_start)."""
    qas = []
    for name, question, answers in questions:
        pairs = [(a, context.index(a)) if isinstance(a, str) else a for a in answers]
        listed = [{"text": text, "answer_start": start} for text, start in pairs]
        qas.append({"id": name, "question": question, "answers": listed})
    return {"context": context, "qas": qas}


def oracle(source):
    """What a network that knows everything says."""
    examples = [source.example(i, 0, 0) for i in range(len(source))]
    start, end = (np.array([int(e[key]) for e in examples]) for key in ("start", "end"))
    return {
        "start": start,
        "end": end,
        "span_score": np.where(start > 0, 2.0, 0.0),
        "null_score": np.where(start > 0, 0.0, 1.0),
    }


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("  AB  cd\tef\n", ["AB", "cd", "ef"]),
        ("\u00c0b c\u0327d e", ["\u00c0b", "c\u0327d", "e"]),  # accents, composed and not
        ("xyz\u0301w\u0301 ab", ["xy", "z\u0301w\u0301", "ab"]),
        ("ab\u0301 \u0301cd \u0301", ["ab\u0301", "cd"]),  # an accent on a space is no piece's
        ("\U0001f600 ab\U0001f600cd", ["\U0001f600", "ab\U0001f600cd"]),  # beyond 16 bits
        ("ab\u4e2d\u6587cd", ["ab", "\u4e2d", "\u6587", "cd"]),
        ("a\x00b c\u200bd \ufffdef", ["a\x00b", "c\u200bd", "ef"]),  # removed characters
        ("\u0130b", ["\u0130b"]),  # its small letter is two characters
        ("ab.cd", ["ab", ".", "cd"]),
    ],
)
def test_offsets_are_of_the_text_as_written(text, pieces):
    numbers, places = TOKENIZER.encode_with_offsets(["ab", text])[1]
    assert numbers == TOKENIZER.encode([text])[0]
    assert [text[first:last] for first, last in places] == pieces


def test_offsets_with_case():
    text = "Ab e\u0301\u0301 \U0001f600 cD"
    ((numbers, places),) = CASED.encode_with_offsets([text])
    assert numbers == CASED.encode([text])[0]
    read = [text[first:last] for first, last in places]
    assert read == ["A", "b", "e\u0301\u0301", "\U0001f600", "cD"]
    # Chinese signs are words of their own, so that this accent is the next word's.
    ((_, places),) = CASED.encode_with_offsets(["\u4e2d\u0301b"])
    assert places == [(0, 1), (1, 3)]
    assert CASED.encode_with_offsets([""]) == [([], [])]
    assert CASED.encode_with_offsets([]) == []


def test_a_window(opened):
    source = opened(squad(paragraph("ab cd ef gh", ("q", "xy zz", ["cd ef"]))), length=14)
    assert len(source) == 1
    example = source.example(0, 5, 9)
    of = TOKENIZER.tokens.index
    cls, sep, pad = TOKENIZER.cls, TOKENIZER.sep, TOKENIZER.pad
    assert example["word"].tolist() == [
        cls, of("xy"), of("zz"), sep, of("ab"), of("cd"), of("ef"), of("gh"), sep, *[pad] * 5,
    ]  # fmt: skip
    assert example["segment"].tolist() == [1] * 9 + [0] * 5
    assert example["type"].tolist() == [0] * 4 + [1] * 5 + [0] * 5
    assert example["position"].tolist() == [*range(9), *[0] * 5]
    assert example["answerable"].tolist() == [0] * 4 + [1] * 4 + [0] * 6
    assert (int(example["start"]), int(example["end"])) == (5, 6)
    dtypes = dict.fromkeys(("word", "segment", "type", "position", "start", "end"), np.int32)
    assert {key: value.dtype for key, value in example.items()} == {**dtypes, "answerable": np.float32}
    assert example["start"].shape == example["end"].shape == ()
    for index in (-1, 1):
        with pytest.raises(IndexError, match=rf"example {index} of 1"):
            source.example(index, 0, 0)


@pytest.mark.parametrize("count", [0, 1, 11, 12, 13, 20, 21, 100, 333])
def test_windows_cover_the_passage(opened, count):
    words = [WORDS[i % len(WORDS)] for i in range(count)]
    data = squad(paragraph(" ".join(words), ("q", "xy", [])), paragraph("ab", ("r", "", [])))
    source = opened(data, stride=5)
    room = 20 - 4  # the question is of one token
    parts = []
    for i in range(len(source) - 1):
        example = source.example(i, 0, 0)
        part = example["word"][example["answerable"] == 1].tolist()
        assert len(part) == room or i == len(source) - 2
        assert int(example["word"][int(example["segment"].sum()) - 1]) == TOKENIZER.sep
        parts.append(part)
    whole = parts[0]
    for before, part in itertools.pairwise(parts):
        assert before[-5:] == part[:5]
        assert len(part) > 5
        whole = whole + part[5:]
    assert whole == TOKENIZER.encode([" ".join(words)])[0]


def test_an_answer_is_in_the_windows_that_have_all_of_it(opened):
    words = WORDS[:40]
    data = squad(paragraph(" ".join(words), ("q", "xy", [" ".join(words[12:18])])))
    source = opened(data, stride=6)
    inside = []
    for i in range(len(source)):
        example = source.example(i, 0, 0)
        start, end = int(example["start"]), int(example["end"])
        answer = TOKENIZER.encode([" ".join(words[12:18])])[0]
        has_it = f" {answer} ".replace("[", "").replace("]", "").strip() in str(example["word"].tolist())
        assert has_it == (start > 0)
        if has_it:
            assert example["word"][start : end + 1].tolist() == answer
        else:
            assert (start, end) == (0, 0)
        inside.append(has_it)
    assert inside == [False, True, False, False]


def test_a_long_question_is_cut(opened):
    data = squad(paragraph("ab cd", ("q", "aa bb cc dd ee ff", ["cd"])))
    example = opened(data, question_length=4).example(0, 0, 0)
    assert example["word"][:6].tolist() == [
        TOKENIZER.cls, *TOKENIZER.encode(["aa bb cc dd"])[0], TOKENIZER.sep,
    ]  # fmt: skip
    assert int(example["start"]) == 7


ODD = [
    ("ab  Caf\u00e9  \u00c0\u0301b\u0301  cd", "Caf\u00e9  \u00c0\u0301b\u0301"),
    ("xy cafe\u0301, ab", "cafe\u0301"),
    ("\U0001f600\U0001f600 ab \U0001f600 cd", "\U0001f600 cd"),
    ("ab\u4e2d\u6587\u5b57cd", "\u6587\u5b57"),
    ("ab\n\n cd\u00a0 ef\u3000gh", "cd\u00a0 ef"),
    ("\u0130\u0130 stanbul ab", "stanbul"),
    ("a\x00b\u00ad cd \ufffdef ab", "cd \ufffdef"),
    ("\ud55c\uad6d ab \u0939\u093f\u0928", "\u0939\u093f\u0928"),
    ('"ab" (cd), ef.', '"ab" (cd)'),
]


@pytest.mark.parametrize("tokenizer", [TOKENIZER, CASED])
def test_the_gold_span_reads_back_as_the_answer(opened, tokenizer):
    data = squad(*(paragraph(text, (str(i), "xy", [answer])) for i, (text, answer) in enumerate(ODD)))
    source = opened(data, tokenizer, length=60, stride=20)
    assert source.skipped == 0
    columns = oracle(source)
    assert source.predictions(columns) == {str(i): answer for i, (_, answer) in enumerate(ODD)}
    assert source.score(columns) == {"exact_match": 100, "f1": 100}


def test_long_passages_read_back(opened):
    rng = np.random.default_rng(0)
    paragraphs = []
    for p in range(6):
        words = [str(word) + ("\u0301" if rng.random() < 0.3 else "") for word in rng.choice(WORDS, 90)]
        text = "  ".join(words)
        starts = np.cumsum([0, *(len(word) + 2 for word in words)])
        questions = []
        for q in range(10):
            first, size = int(rng.integers(88)), int(rng.integers(1, 4))
            answer = "  ".join(words[first : first + size])
            questions.append((f"{p}.{q}", "xy zz", [(answer, int(starts[first]))]))
        paragraphs.append(paragraph(text, *questions))
    source = opened(squad(*paragraphs))
    assert len(source) == 60 * 8
    assert source.score(oracle(source)) == {"exact_match": 100, "f1": 100}
    wanted = {q["id"]: q["answers"][0]["text"] for p in paragraphs for q in p["qas"]}
    assert source.predictions(oracle(source)) == wanted


def test_the_smallest_span_of_tokens_that_covers_the_answer(opened):
    data = squad(paragraph("ab cdef gh", ("q", "xy", [("de", 4)]), ("r", "xy", [("f g", 6)])))
    source = opened(data)
    assert TOKENIZER.encode(["cdef"])[0] == [
        TOKENIZER.tokens.index(piece) for piece in ("cd", TAILS[4 * 26 + 5])
    ]
    assert source.predictions(oracle(source)) == {"q": "cdef", "r": "ef gh"}


def test_an_answer_elsewhere_is_the_nearest_one(opened):
    context = "ab cd ab cd ab"
    for start, token in ((0, 3), (2, 3), (5, 5), (8, 5), (99, 7), (-9, 3)):
        source = opened(squad(paragraph(context, ("q", "xy", [("ab", start)]))))
        assert int(source.example(0, 0, 0)["start"]) == token
        assert source.skipped == 0
    overlapping = opened(squad(paragraph(context.replace("cd ", ""), ("q", "xy", [("ab ab", 3)]))))
    assert int(overlapping.example(0, 0, 0)["start"]) == 4


def test_an_answer_nowhere_is_counted(opened):
    data = squad(
        paragraph("ab cd", ("q", "xy", [("zz", 0)]), ("r", "xy", [("zz", 0), "cd"]), ("s", "xy", [("", 1)])),
        paragraph("ab   cd", ("t", "xy", [("  ", 2)]), ("u", "xy", [])),
    )
    source = opened(data)
    assert source.skipped == 3
    assert [int(source.example(i, 0, 0)["start"]) for i in range(5)] == [0, 4, 0, 0, 0]
    assert source.questions[1].answers == ("zz", "cd")


def test_normalized():
    assert normalized("The  Cat, a dog & an Ape!") == "cat dog ape"
    assert normalized("theatre a-n") == "theatre"  # "a-n" becomes "an" before articles go
    assert normalized("A.\tb\u00a0c") == "b c"
    assert normalized("the") == ""
    assert normalized("\u201cab\u201d") == "\u201cab\u201d"  # only ASCII's punctuation


def test_token_f1():
    assert token_f1("the big cat", "Big red cat.") == pytest.approx(2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3))
    assert token_f1("cat cat dog", "cat cat cat") == pytest.approx(2 / 3)
    assert token_f1("ab", "cd") == 0
    assert token_f1("", "") == token_f1("the", "") == 1
    assert token_f1("ab", "") == token_f1("", "ab") == 0


def test_scores_worked_out_by_hand(opened):
    data = squad(
        paragraph(
            "the ab cd ef",
            ("exact", "xy", ["cd", ("the AB", 0)]),
            ("half", "xy", ["cd ef", "ab cd"]),
            ("wrong", "xy", ["cd"]),
            ("article", "xy", ["the", "cd"]),
            ("only article", "xy", ["the"]),
        )
    )
    source = opened(data)
    assert source.unanswerable is False
    # The passage starts at 3: "the" is "th" and "##e", so "ab" is 5.
    columns = {
        "start": np.array([5, 6, 7, 3, 3]),
        "end": np.array([5, 6, 7, 4, 4]),
        "span_score": np.zeros(5),
        "null_score": np.ones(5),  # no matter: each question has an answer
    }
    assert source.predictions(columns) == {
        "exact": "ab",
        "half": "cd",
        "wrong": "ef",
        "article": "the",
        "only article": "the",
    }
    score = source.score(columns)
    # Officially "the" is no right answer, unless there is no other; then nothing is right.
    assert score == pytest.approx({"exact_match": 100 * 2 / 5, "f1": 100 * (1 + 2 / 3 + 0 + 0 + 1) / 5})


def test_the_best_window_is_taken(opened):
    source = opened(squad(paragraph(" ".join(WORDS[:40]), ("q", "xy", ["aa"]))))
    columns = {
        "start": np.array([3, 3, 3]),
        "end": np.array([3, 4, 5]),
        "span_score": np.array([-5.0, -1.0, -1.0]),
        "null_score": np.array([0.0, 0.0, 0.0]),
    }
    assert len(source) == 3
    assert source.predictions(columns) == {"q": " ".join(WORDS[12:14])}  # of equal ones the first


def test_spans_off_the_passage_are_no_answer(opened):
    source = opened(squad(paragraph("ab cd ef", ("q", "xy", ["aa"[:1]]))))

    def said(start, end):
        ones = np.ones(1)
        columns = {"start": [start], "end": [end], "span_score": ones, "null_score": ones}
        return source.predictions({key: np.array(value) for key, value in columns.items()})["q"]

    assert said(3, 5) == "ab cd ef"
    assert {said(*span) for span in ((0, 0), (2, 3), (5, 6), (4, 3), (19, 19))} == {""}


def test_no_answer_of_squad_2(opened):
    long = " ".join(WORDS[:40])
    data = squad(paragraph(long, ("none", "xy", []), ("some", "xy", ["aa ab"]), ("miss", "xy", [])))
    for question in data["data"][0]["paragraphs"][0]["qas"]:
        question["is_impossible"] = not question["answers"]
        question["plausible_answers"] = [{"text": "aa", "answer_start": 0}]
    source = opened(data)
    assert source.unanswerable
    assert len(source) == 9
    assert source.skipped == 0
    assert source.score(oracle(source)) == {"exact_match": 100, "f1": 100}
    columns = oracle(source)
    columns["start"][:] = columns["end"][:] = 3
    columns["span_score"] = np.array([1, 2, 1, 1, 5, 1, 2, 0, 0], float)
    columns["null_score"] = np.array([3, 4, 2.5, 9, 9, 5, 9, 9, 2], float)
    # The lowest null score of a question has to be above its highest span score: 2.5 > 2, 5 = 5, 2 = 2.
    assert source.predictions(columns) == {"none": "", "some": WORDS[12], "miss": WORDS[0]}
    assert source.score(columns) == pytest.approx({"exact_match": 100 / 3, "f1": 100 / 3})


def test_columns_of_another_length(opened):
    source = opened(squad(paragraph("ab", ("q", "xy", ["ab"]))))
    for key in oracle(source):
        columns = oracle(source)
        columns[key] = np.zeros(2)
        for read in (source.predictions, source.score):
            with pytest.raises(ValueError, match=rf"{key} has the shape \(2,\), and 1 windows"):
                read(columns)


def test_impossible_settings(opened):
    data = squad(paragraph("ab", ("q", "xy", ["ab"])))
    for settings in ({"length": 12}, {"stride": 12}, {"question_length": 13}, {"length": 3}):
        with pytest.raises(ConfigError, match=r"data\.length .*data\.question_length .*data\.stride"):
            opened(data, **settings)
    with pytest.raises(ConfigError, match=r"set data\.length to at least 13"):
        opened(data, length=12)
    assert len(opened(data, length=13)) == 1


def broken(change):
    data = squad(
        paragraph("ab", ("p", "xy", ["ab"])), paragraph("ab", ("q", "xy", ["ab"]), ("r", "xy", ["ab", "ab"]))
    )
    change(data, data["data"][0]["paragraphs"][1]["qas"][1])
    return data


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d, q: d.pop("data"), r"squad\.json is no SQuAD file: data is missing"),
        (lambda d, q: d.update(data={}), r"data is an object, not a list"),
        (lambda d, q: d["data"].append(1), r"data\[1\] is a whole number, not an object"),
        (lambda d, q: d["data"][0].pop("paragraphs"), r"data\[0\]\.paragraphs is missing"),
        (
            lambda d, q: d["data"][0]["paragraphs"][1].pop("qas"),
            r"data\[0\]\.paragraphs\[1\]\.qas is missing",
        ),
        (lambda d, q: d["data"][0]["paragraphs"][0].pop("context"), r"paragraphs\[0\]\.context is missing"),
        (lambda d, q: q.pop("answers"), r"data\[0\]\.paragraphs\[1\]\.qas\[1\]\.answers is missing"),
        (lambda d, q: q.pop("id"), r"qas\[1\]\.id is missing"),
        (lambda d, q: q.pop("question"), r"qas\[1\]\.question is missing"),
        (lambda d, q: q.update(question=None), r"qas\[1\]\.question is null, not a string"),
        (lambda d, q: q.update(question="\ud83d"), r"qas\[1\]\.question has half a character"),
        (lambda d, q: q.update(id="p"), r"paragraphs\[1\]\.qas\[1\]\.id 'p' is that of another"),
        (lambda d, q: q.update(is_impossible=True), r"qas\[1\] \(id 'r'\) is_impossible, but has answers"),
        (lambda d, q: q.update(is_impossible="no"), r"is_impossible is a string, not a boolean"),
        (lambda d, q: q["answers"][1].pop("text"), r"qas\[1\]\.answers\[1\]\.text is missing"),
        (lambda d, q: q["answers"][1].update(answer_start=True), r"answer_start is a boolean, not a whole"),
        (lambda d, q: d["data"].clear(), r"squad\.json has no questions"),
    ],
)
def test_files_that_are_not_squad(opened, change, match):
    with pytest.raises(DataError, match=match):
        opened(broken(change))


def test_files_that_cannot_be_read(opened, tmp_path):
    for content, match in (
        (b"{", r"squad\.json is no SQuAD file: not JSON \(.*line 1"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "the whole is a list, not an object"),
        (b"", "is empty"),
        (b'{\n"\xff', r"line 2 is not UTF-8"),
    ):
        with pytest.raises(DataError, match=match):
            opened(content)
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(DataError, match="cannot be read"):
            open_squad(path, TOKENIZER)


def test_a_byte_order_mark(opened):
    data = squad(paragraph("ab", ("q", "xy", ["ab"])))
    assert len(opened(b"\xef\xbb\xbf" + json.dumps(data).encode())) == 1
