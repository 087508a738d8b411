"""What a scalar means, and what is wrong with a text, with its line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from det_lightning.config import read_config, yaml_reader
from det_lightning.config.yaml_reader import YamlDocument
from det_lightning.errors import ConfigError


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("1e-3", 0.001),
        ("-0.0", 0),
        ("1e20", 10**20),
        ("-1.2345678901234567e18", -1234567890123456800),
        ("1_000", 1000),
        ("0o17", 15),
        ("1:30", "1:30"),
        ("true", True),
        ("~", None),
        ("", None),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
        ("|\n  two\n  lines", "two\nlines"),
        ('"\\ud83d\\ude00"', "\U0001f600"),
    ],
)
def test_values_read_as_on_the_platform(scalar: str, value: Any) -> None:
    document = YamlDocument(f"a: {scalar}")
    assert (document.data, document.mistakes, document.notes) == ({"a": value}, [], [])
    assert type(document.data["a"]) is type(value)


@pytest.mark.parametrize("scalar", ["yes", "On", "y", "no", "OFF", "N"])
def test_old_booleans_are_noted(scalar: str) -> None:
    document = YamlDocument(f"a: 1\nb: {scalar}")
    assert document.data["b"] is (scalar in ("yes", "On", "y"))
    (note,) = document.notes
    assert (note.line, note.path) == (2, "b")
    assert f"'{scalar}'" in note.message


def test_keys_are_text_no_text_is_none() -> None:
    assert YamlDocument("1: a\nyes: b\n2.5: c\ntrue: d").data == {"1": "a", "yes": "b", "2.5": "c", "true": "d"}
    assert YamlDocument("# nothing").data is None


def test_anchors_and_merge_keys_work(recwarn: pytest.WarningsRecorder) -> None:
    text = "base: &b {x: 1, y: 2}\nother: &o {y: 3, z: 4}\na: *b\nb: {<<: *b, y: 5}\nc: {<<: [*b, *o]}"
    document = YamlDocument(f"{text}\nd: {{<<: *o, <<: *b}}")
    assert document.data["a"] == {"x": 1, "y": 2}
    assert document.data["b"] == {"x": 1, "y": 5}
    assert document.data["c"] == {"x": 1, "y": 2, "z": 4}
    assert document.data["d"] == {"x": 1, "y": 3, "z": 4}
    assert document.lines.find(("d", "y")) == 2
    # An anchor may be set again.
    assert YamlDocument("a: &x 1\nb: *x\nc: &x 2\nd: *x").data == {"a": 1, "b": 1, "c": 2, "d": 2}
    assert not list(recwarn)


@pytest.mark.parametrize(
    ("text", "line", "path", "message"),
    [
        ("a: 1\nb: 2\na: 3", 3, "a", "duplicate key; the first is in line 1"),
        ("a:\n- 1\n- .inf", 3, "a[1]", "must be a finite number; got .inf"),
        ("a: .nan", 1, "a", "must be a finite number"),
        ("a: 017", 1, "a", "017 is 17 in YAML 1.2 and 15 before: write 17 or 0o17"),
        ('a: "\\ud83d"', 1, "a", "half a character"),
        ("a: 1\nb: !tuple [1]", 2, "b", "values of the type !tuple cannot be used"),
        ("? [1]\n: 2", 1, "", "a key must be a string"),
        ("a: 1\nb: &x [*x]", 2, "b[0]", "an alias must not stand for a value around it"),
        ("a: {<<: 3}", 1, "a", "<< takes a mapping"),
        ("a: b: c", 1, "", "mapping values are not allowed here"),
        ("a: 1\n---\nb: 2", 2, "", "expected a single document"),
        ("%YAML 1.7\n---\na: 1", None, "", "not YAML: version"),
        ("a: \x00", None, "", "not YAML: unacceptable character"),
    ],
)
def test_a_mistake_has_its_line_and_keys(text: str, line: int | None, path: str, message: str) -> None:
    (mistake,) = YamlDocument(text).mistakes
    assert (mistake.line, mistake.path) == (line, path)
    assert message in mistake.message


def test_mistakes_of_values_come_together() -> None:
    assert [mistake.line for mistake in YamlDocument("a: .inf\na: 1\nb: !x 1\nc: 017").mistakes] == [1, 2, 3, 4]


@pytest.mark.slow
def test_aliases_cannot_fill_the_memory() -> None:
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    (mistake,) = YamlDocument("\n".join(rows)).mistakes
    assert "more than 25,000 keys and values" in mistake.message


@pytest.mark.slow
def test_merge_keys_take_linear_time() -> None:
    rows = [f"  <<: {{k{number}: 1}}" for number in range(5_000)]
    assert len(YamlDocument("a:\n" + "\n".join(rows)).data["a"]) == 5_000


@pytest.mark.parametrize(
    "text",
    ["\n".join(f"k{i:05}: 1" for i in range(20_000)), "? a\n" * 20_000, f"a: [{'1,' * 20_000}]", "- a\n" * 20_000],
    ids=["unknown keys", "duplicate keys", "values of a list", "a list"],
)
def test_large_texts_are_refused_early(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_reader, "_MOST_VALUES", 1_000)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with pytest.raises(ConfigError, match="more than 1,000 keys and values") as caught:
            read_config(f"{text}\n")
    finally:
        sys.setprofile(before)
    assert len(caught.value.mistakes) == 1
    assert calls < 320_000


@pytest.mark.parametrize("number", ["0" * 5000, "1" * 400, "0x" + "f" * 5000], ids=["zeros", "ones", "hexadecimal"])
def test_infinite_numbers_are_mistakes(number: str) -> None:
    (mistake,) = YamlDocument(f"a: {number}").mistakes
    assert "too large" in mistake.message


def test_texts_have_a_size_limit(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(2**34)
    with pytest.raises(ConfigError, match="more than 1,048,576 characters"):
        read_config(file)


@pytest.mark.slow
def test_nesting_cannot_end_the_process() -> None:
    (mistake,) = YamlDocument("a: " + "[" * 2_000 + "]" * 2_000).mistakes
    assert "too many levels" in mistake.message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("*hunter2", "found undefined alias: write the value in quotes"),
        ("!hunter2", "cannot be used"),
        ("0777112", "write it in quotes"),
    ],
)
def test_unreadable_texts_hide_secrets(value: str, message: str) -> None:
    (mistake,) = YamlDocument(f"checkpoint_storage:\n  secret_key: {value}\n").mistakes
    assert mistake.line == 2
    assert message in mistake.message
    assert not any(part in str(mistake) for part in ("hunter2", "777112", str(0o777112)))
