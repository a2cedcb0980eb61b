"""CoNLL-U: the real treebank, what is skipped, and every line that is wrong."""

import gzip

import pytest

from structconv.errors import DataError
from structconv_systems.data.conllu import read_conllu


@pytest.mark.parametrize("part, sentences, words", [("dev", 2001, 25_147), ("test", 2077, 25_094)])
def test_english_ewt_has_its_published_counts(real, part, sentences, words):
    read = read_conllu(real("ud_ewt") / f"en_ewt-ud-{part}.conllu.gz")
    assert (len(read), sum(map(len, read))) == (sentences, words)
    assert all((head == 0) == (relation == "root") for sentence in read
               for head, relation in zip(sentence.heads, sentence.relations, strict=True))


def row(number, head, form="f", **columns):
    return "\t".join([str(number), form, columns.get("lemma", "_"), columns.get("upos", "X"), columns.get("xpos", "_"),
                      "_", str(head), columns.get("relation", "dep"), "_", columns.get("misc", "_")])


def tree(*heads):
    return [row(number, head) for number, head in enumerate(heads, 1)]


def test_words_are_read_and_the_rest_is_skipped(written):
    path = written("a.conllu", "\n".join([
        "# text = vámonos al mar", "", "# sent_id = 1", "1-2\tvámonos" + "\t_" * 8,
        row(1, 0, "vamos", lemma="ir", upos="VERB", xpos="V", relation="root"),
        row(2, 1, "nos", lemma="nosotros", upos="PRON", xpos="P", relation="obj"),
        "2.1\t_\t_\t_\t_\t_\t_\t_\t1:obl\t_", "# in between",
        row(3, 1, "10 000", lemma="_", upos="NUM", xpos="N", relation="obl:arg"), "", " ", "", *tree(2, 0)]))
    first, second = read_conllu(path)
    assert first.forms == ("vamos", "nos", "10 000")
    assert first.lemmas == ("ir", "nosotros", "_")
    assert (first.upos, first.xpos) == (("VERB", "PRON", "NUM"), ("V", "P", "N"))
    assert (first.heads, first.relations) == ((0, 1, 1), ("root", "obj", "obl:arg"))
    assert (len(first), len(second), second.heads) == (3, 2, (2, 0))


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n\n\n# end\n"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_ends_as_it_likes(written, end, pack):
    path = written("a.conllu", pack(("\r\n".join(tree(0, 1)) + end).encode()))
    assert [sentence.heads for sentence in read_conllu(path)] == [(0, 1)]


def columns(number):
    return "\t".join(["1", "f", *["_"] * (number - 2)])


@pytest.mark.parametrize("rows, line, message", [
    ([columns(9)], 1, r"expected 10 columns with tabs between them; got 9\."),
    ([columns(11)], 1, r"expected 10 columns with tabs between them; got 11\."),
    (["1 f _ X _ _ 0 root _ _"], 1, r"expected 10 columns with tabs between them; got 1\."),
    (["1-2\tf"], 1, r"expected 10 columns with tabs between them; got 2\."),
    ([row(1, 0), row(2, 1, form="")], 2, r"expected something in column FORM; got nothing\. .* written as _"),
    ([row(1, 0, misc="")], 1, r"expected something in column MISC; got nothing\."),
    ([row(2, 0)], 1, r"expected the ID 1, or one of the forms 1-2 and 1\.1; got '2'\."),
    ([row(1, 0), row(1, 1)], 2, r"expected the ID 2, .*; got '1'\."),
    ([row(1, 0), row(3, 1)], 2, r"expected the ID 2, .*; got '3'\."),
    ([row(1, 0), "# c", row("-", 1)], 3, r"expected the ID 2, .*; got '-'\."),
    ([row("01", 0)], 1, r"expected the ID 1, .*; got '01'\."),
    ([row("x", 0)], 1, r"expected the ID 1, .*; got 'x'\."),
    ([row("²", 0)], 1, r"expected the ID 1, .*; got '²'\."),
    ([row("9" * 5000, 0)], 1, r"expected the ID 1, .*; got '9999"),
    ([row(1, 0), row(2, "x")], 2, r"expected a HEAD from 0 to 2; got 'x'\."),
    ([row(1, 0), row(2, "_")], 2, r"expected a HEAD from 0 to 2; got '_'\."),
    ([row(1, 0), row(2, "1.0")], 2, r"expected a HEAD from 0 to 2; got '1\.0'\."),
    ([row(1, 0), row(2, -1)], 2, r"expected a HEAD from 0 to 2; got '-1'\."),
    ([row(1, 0), row(2, 3)], 2, r"expected a HEAD from 0 to 2; got '3'\."),
    ([row(1, 0), row(2, "²")], 2, r"expected a HEAD from 0 to 2; got '²'\."),
    ([row(1, 0), row(2, "9" * 5000)], 2, r"expected a HEAD from 0 to 2; got '999"),
    (tree(2, 1), 1, r"expected a word whose HEAD is 0, the root of its sentence; got none\."),
    (tree(0, 1, 0), 3, r"expected one root of the sentence; got words 1 and 3, both with HEAD 0\."),
    (tree(0, 2), 2, r"expected a tree; got a cycle of heads, 2 -> 2\."),
    (tree(0, 3, 4, 2, 2), 2, r"expected a tree; got a cycle of heads, 2 -> 3 -> 4 -> 2\."),
    (tree(5, 0, 4, 3, 4), 4, r"expected a tree; got a cycle of heads, 4 -> 3 -> 4\."),
    ([*tree(0), "", "# s", *tree(0, 3, 2)], 5, r"expected a tree; got a cycle of heads, 2 -> 3 -> 2\."),
    ([*tree(0), "", "1-2\tf" + "\t_" * 8], 3, r"expected a sentence with words; got none\."),
    (["# c"], None, r"expected a sentence; got comments alone\.")])
def test_a_wrong_line_is_named(written, rows, line, message):
    path = written("a.conllu", "\n".join(rows))
    where = "" if line is None else f", line {line}"
    with pytest.raises(DataError, match=rf"a\.conllu{where}: {message}"):
        read_conllu(path)


def test_a_long_sentence_is_read_in_time(written):
    path = written("a.conllu", "\n".join(tree(*range(50_000))))
    assert read_conllu(path)[0].heads == tuple(range(50_000))
