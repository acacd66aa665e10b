"""What a `tokenizer.json` gives, and how long texts are cut for it."""

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from recipes.data import (
    ByteTokenizer,
    DataConfig,
    TokenizerConfig,
    check_vocabulary,
    load_dataset,
    load_tokenizer,
    prompt_tokens,
)
from recipes.data.pieces import pieces
from tests.recipes.data_stores import train_tokenizer

SPECIALS = ("<s>", "</s>", "<|endoftext|>", "<|im_end|>")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_tokens_are_those_of_the_library_and_give_the_text_back(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", specials=SPECIALS)
    tokenizer, library = load_tokenizer(TokenizerConfig(file=path)), Tokenizer.from_file(path)
    for text in ("", "the cat and the hat", "naïve ß 漢字 🙂\n\x00"):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode([0, *tokenizer.encode(text), 1, 10_000, -1]) == text
    assert [each.tolist() for each in tokenizer.encode_batch([b"the", b"", b"cat"])] == [
        tokenizer.encode(text) for text in ("the", "", "cat")
    ]
    assert tokenizer.vocab_size == library.get_vocab_size() == 280
    assert not tokenizer.takes_any_bytes
    for broken in (b"\xff", "\udcff"):
        with pytest.raises(ValueError, match="the text is not UTF-8"):
            tokenizer.encode(broken)


def test_a_folder_names_the_tokenizer_in_it(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json")
    assert load_tokenizer(TokenizerConfig(file=str(tmp_path))).eos == load_tokenizer(TokenizerConfig(file=path)).eos


def test_the_name_of_a_special_token_in_a_text_is_plain_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json", specials=SPECIALS)))
    tokens = tokenizer.encode("cat</s> dog<|im_end|>")
    assert not {tokenizer.special(name) for name in SPECIALS} & set(tokens)
    assert tokenizer.decode(tokens) == "cat</s> dog<|im_end|>"


def test_truncation_padding_and_template_of_the_file_are_left_out(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", specials=SPECIALS)
    plain = load_tokenizer(TokenizerConfig(file=path))
    library = Tokenizer.from_file(path)
    library.enable_truncation(3)
    library.enable_padding(length=64)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    library.save(path)
    tokenizer = load_tokenizer(TokenizerConfig(file=path))
    texts = [b"the cat and the dog", b"hat"]
    assert [each.tolist() for each in tokenizer.encode_batch(texts)] == [plain.encode(text) for text in texts]
    assert len(tokenizer.encode(texts[0])) > 3


@pytest.mark.parametrize(
    ("specials", "beside", "configured", "expected"),
    [
        (("<s>", "</s>"), None, {}, ("<s>", "</s>")),
        (("<|endoftext|>",), None, {}, (None, "<|endoftext|>")),
        (SPECIALS, {"bos_token": None, "eos_token": "<|im_end|>"}, {}, (None, "<|im_end|>")),
        (SPECIALS, {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}}, {}, ("<s>", "</s>")),
        (SPECIALS, {"bos_token": "</s>", "eos_token": "</s>"}, {}, (None, "</s>")),
        (SPECIALS, {"bos_token": "</s>", "eos_token": "</s>"}, {"bos": "</s>"}, ("</s>", "</s>")),
        (SPECIALS, {"eos_token": "</s>"}, {"eos": "<|im_end|>", "bos": ""}, (None, "<|im_end|>")),
        (("[mine]",), None, {"eos": "[mine]"}, (None, "[mine]")),
    ],
)
def test_bos_and_eos_are_configured_or_named_beside_the_file_or_usual(
    tmp_path: Path,
    specials: tuple[str, ...],
    beside: object,
    configured: dict[str, str],
    expected: tuple[str | None, str],
) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", specials=specials)
    if beside is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
    tokenizer = load_tokenizer(TokenizerConfig(file=path, **configured))
    bos, eos = expected
    assert tokenizer.eos == tokenizer.pad == tokenizer.special(eos)
    assert tokenizer.bos == (None if bos is None else tokenizer.special(bos))
    assert prompt_tokens(tokenizer, "")[0] == tokenizer.special(bos or eos)
    opening = [] if bos is None else [tokenizer.special(bos)]
    assert prompt_tokens(tokenizer, "the") == [*opening, *tokenizer.encode("the")]


@pytest.mark.parametrize(
    ("specials", "beside", "configured", "message"),
    [
        (("[mine]",), None, {}, "does not say which token ends a document"),
        (SPECIALS, None, {"eos": "<end>"}, "has no token '<end>', given as tokenizer eos"),
        (SPECIALS, None, {"bos": "<end>"}, "has no token '<end>'"),
        (SPECIALS, '{"eos_token": "<end>"}', {}, "has no token '<end>', that tokenizer_config.json names"),
        (SPECIALS, "{", {}, "tokenizer_config.json': not JSON"),
    ],
)
def test_a_file_without_the_tokens_that_end_documents_is_refused(
    tmp_path: Path, specials: tuple[str, ...], beside: str | None, configured: dict[str, str], message: str
) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", specials=specials)
    if beside is not None:
        (tmp_path / "tokenizer_config.json").write_text(beside)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(TokenizerConfig(file=path, **configured))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer file .*nowhere"):
        load_tokenizer(TokenizerConfig(file=str(tmp_path / "nowhere")))
    for broken in ("{}", "no json", ""):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json.*not a tokenizer\.json of Hugging Face"):
            load_tokenizer(TokenizerConfig(file=str(tmp_path)))


def test_a_missing_package_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers; pip install 'meshwright\[recipes\]'"):
        load_tokenizer(TokenizerConfig(file=path))


def test_bos_and_eos_of_bytes_and_empty_names_are_refused() -> None:
    for values in ({"bos": "<s>"}, {"eos": "</s>"}, {"file": ""}, {"file": "x", "eos": ""}):
        with pytest.raises(ValueError, match=r"tokenizer (bos|eos|file)"):
            TokenizerConfig(**values)
    with pytest.raises(ValueError, match="bytes have no token '<s>'"):
        ByteTokenizer().special("<s>")


def test_a_model_with_fewer_embeddings_than_tokens_is_refused(tmp_path: Path) -> None:
    check_vocabulary(DataConfig(), 260)
    with pytest.raises(ValueError, match=r"vocab_size=259 must be at least the 260 tokens .*\(bytes\)"):
        check_vocabulary(DataConfig(), 259)
    config = DataConfig(tokenizer=TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json")))
    check_vocabulary(config, 280)
    with pytest.raises(ValueError, match="vocab_size=279 must be at least the 280 tokens"):
        check_vocabulary(config, 279)


def test_documents_of_text_are_bos_tokens_and_eos_whatever_their_length(tmp_path: Path) -> None:
    path = train_tokenizer(tmp_path / "tokenizer.json", specials=SPECIALS)
    tokenizer = load_tokenizer(TokenizerConfig(file=path))
    texts = {"a.txt": "the cat", "b.txt": "and the dog " * 9000, "c.txt": "hat"}
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    config = DataConfig(source=str(folder), tokenizer=TokenizerConfig(file=path), held_out_fraction=0)
    data = load_dataset(config).train
    expected = [
        token for text in texts.values() for token in [tokenizer.special("<s>"), *tokenizer.encode(text), tokenizer.eos]
    ]
    tokens = [token for index in range(data.num_samples) for token in data.sample(index).tokens.tolist()]
    assert tokens[: len(expected) - 1] == expected[:-1]
    assert data.num_tokens == len(expected)


@pytest.mark.parametrize("block_bytes", [1, 7, 1000, 100_000])
def test_pieces_are_the_text_and_change_no_token_of_a_tokenizer_that_splits_words(
    tmp_path: Path, block_bytes: int
) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json")))
    text = ("the cat\n  and\n\nthe\n\n\n the dog  \n\thats it's  \n" * 20 + "漢字🙂 and " * 9 + "\n").encode() * 3
    cut = list(pieces((text[at : at + block_bytes] for at in range(0, len(text), block_bytes)), 64))
    assert b"".join(cut) == text
    assert max(map(len, cut)) <= 64
    assert [token for piece in cut for token in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_a_text_without_any_break_is_cut_between_characters() -> None:
    text = "漢🙂é".encode() * 50
    cut = list(pieces([text], 10))
    assert b"".join(cut) == text
    for piece in cut:
        assert 7 <= len(piece) <= 10 or piece == cut[-1]
        piece.decode()
    assert list(pieces([b"\x80" * 25], 10)) == [b"\x80" * 10, b"\x80" * 10, b"\x80" * 5]
    assert list(pieces([b" " * 25], 10)) == [b" " * 10, b" " * 10, b" " * 5]
    assert list(pieces([])) == []
