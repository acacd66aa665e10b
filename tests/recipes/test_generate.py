"""Sampling from a checkpoint: the same text on every mesh, any prompt, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import recipes.generate
from checkpoint import TrainState, save
from parallel import ParallelConfig
from recipes.data import ByteTokenizer, TextStream, load_tokenizer
from recipes.data.config import DataConfig, TokenizerConfig
from recipes.from_checkpoint import find_checkpoint, load_model
from recipes.generate import GenerateCommand, generate, print_sample
from recipes.recipe import Recipe
from recipes.sampling import draw, next_logits, sample
from recipes.train import train
from tests.parallel import small_model
from tests.ranks import run_ranks
from tests.recipes.data_stores import train_tokenizer
from tests.recipes.small_recipe import small_recipe

TP = ParallelConfig(tp=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A float64 recipe after a few steps, so that rounding cannot tip a draw."""
    training = {"stored_dtype": "float64", "stop_at": 8}
    recipe = small_recipe(tmp_path_factory.mktemp("trained"), training=training)
    run_ranks(2, train, recipe)
    return recipe


def text_of(command: GenerateCommand, recipe: Recipe) -> str:
    return "".join(generate(command, recipe))


def _sample(recipe: Recipe, parallel: ParallelConfig | None = None, world_size: int = 2, **options: object) -> str:
    command = GenerateCommand(
        checkpoint=str(recipe.output.checkpoints),
        parallel=parallel or ParallelConfig(),
        **{"prompt": "mesh ", "num_tokens": 12, **options},  # type: ignore[arg-type]
    )
    texts = run_ranks(world_size, text_of, command, recipe)
    assert len(set(texts)) == 1
    return str(texts[0])


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_the_text_depends_on_the_seed_and_not_on_the_mesh(temperature: float, trained: Recipe) -> None:
    one = _sample(trained, world_size=1, temperature=temperature, seed=1)
    assert one
    assert _sample(trained, temperature=temperature, seed=1) == one
    assert _sample(trained, TP, temperature=temperature, seed=1) == one
    other = _sample(trained, world_size=1, temperature=temperature, seed=2)
    assert (other == one) == (temperature == 0)


@pytest.mark.parametrize(
    "prompt",
    ["", "a", "ab", "mesh rank shard view axis", "\N{SNOWMAN} na\xefve", "\udcff"],
    ids=["empty", "2 tokens", "3 tokens", "longer than the context", "unicode", "no UTF-8"],
)
def test_any_prompt_is_continued_under_sequence_parallel(prompt: str, trained: Recipe) -> None:
    assert _sample(trained, TP, prompt=prompt, num_tokens=4) == _sample(
        trained, world_size=1, prompt=prompt, num_tokens=4
    )


@pytest.mark.parametrize("replicated", [{}, {"data_parallel": "ddp"}])
def test_ranks_that_would_share_a_sequence_hold_parameters_instead(replicated: dict[str, Any], trained: Recipe) -> None:
    parallel = ParallelConfig(cp=2, cp_method="ring", **replicated)
    assert _sample(trained, parallel) == _sample(trained, world_size=1)
    command = GenerateCommand(checkpoint="", parallel=dataclasses.replace(parallel, dp_replicate=1, dp_shard=1))
    axis = "dp_replicate" if replicated else "dp_shard"
    assert (getattr(command.layout, axis), command.layout.cp, command.layout.cp_method) == (2, 1, None)


def _endless(recipe: Recipe, parallel: ParallelConfig, caches: tuple[bool, ...]) -> list[str]:
    """Texts of three contexts after prompts of several lengths, whatever token is drawn."""
    command = GenerateCommand(
        checkpoint=str(recipe.output.checkpoints), parallel=parallel, num_tokens=48, temperature=1.0, top_p=0.95
    )
    with mock.patch.object(ByteTokenizer, "eos", -1):
        return [
            text_of(dataclasses.replace(command, prompt=prompt, cache=cache), recipe)
            for cache in caches
            for prompt in ("", "mesh rank", "mesh rank shard view axis")
        ]


def test_the_cache_changes_no_text_on_any_mesh_even_beyond_the_context(trained: Recipe) -> None:
    (found,) = run_ranks(1, _endless, trained, ParallelConfig(), (False, True))
    plain = found[:3]
    assert found[3:] == plain
    assert all(len(text) > 20 for text in plain)
    for parallel in (TP, ParallelConfig()):
        assert run_ranks(2, _endless, trained, parallel, (True,)) == [plain, plain]


def _windows(recipe: Recipe) -> tuple[list[int], list[float]]:
    """How many tokens each call computes, and how far its logits are from those of the window written out."""
    trained = load_model(find_checkpoint(recipe.output.folder), recipe, ParallelConfig())
    whole, sizes, differences = trained.logits, [], []

    def counted(tokens: Tensor, **inputs: Tensor) -> Tensor:
        sizes.append(tokens.shape[1])
        return whole(tokens, **inputs)

    tokens = list(range(80, 85))
    with mock.patch.object(trained, "logits", counted), next_logits(trained, 16, 40, cache=True) as logits_of:
        while len(tokens) < 40:
            cached = logits_of(tokens)
            # All tokens up to the length 16, and after that the latest 9 to 16.
            begin = 0 if len(tokens) <= 16 else 8 * ((len(tokens) - 9) // 8)
            seen = torch.tensor([tokens[begin:]])
            differences.append((cached, seen))
            tokens.append(80 + len(tokens))
    return sizes, [small_model.difference(cached, whole(seen)[0, -1]) for cached, seen in differences]


def test_the_cache_computes_one_token_at_a_time_and_half_a_context_where_that_is_outgrown(trained: Recipe) -> None:
    ((sizes, differences),) = run_ranks(1, _windows, trained)
    assert sizes == [5, *[1] * 11, 9, *[1] * 7, 9, *[1] * 7, 9, *[1] * 6]
    assert len(differences) == 35
    assert max(differences) < 1e-12


@pytest.mark.parametrize(
    ("top_p", "among"), [(1.0, {0, 1, 2, 3}), (0.97, {0, 1, 2, 3}), (0.9, {0, 1, 3}), (0.6, {1, 3}), (0.1, {1})]
)
def test_top_p_draws_among_the_likeliest_that_together_reach_it(top_p: float, among: set[int]) -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    drawn = [sample(logits, 1.0, top_p, generator) for _ in range(400)]
    assert set(drawn) == among
    # In proportion to their probabilities, which the temperature sharpens.
    share = 0.5 / sum(float(logits[token].exp()) for token in among)
    assert drawn.count(1) / 400 == pytest.approx(share, abs=0.08)
    sharp = [sample(logits, 0.5, top_p, generator) for _ in range(400)]
    assert sharp.count(1) >= drawn.count(1)
    assert sample(logits, 0.0, top_p, generator) == 1
    assert sample(logits, 1e-310, top_p, generator) == 1


def test_a_checkpoint_is_found_from_the_folder_of_its_run_too(trained: Recipe) -> None:
    found = find_checkpoint(trained.output.folder)
    assert Path(found).name == "step-00000008"
    assert find_checkpoint(str(trained.output.checkpoints)) == found
    assert find_checkpoint(found) == found


def _print_sample(words: list[str]) -> None:
    recipes.generate.main(words)
    # The command leaves the group; the pool of ranks expects none either.
    assert not dist.is_initialized()


def test_the_command_prints_prompt_and_sample_once(
    trained: Recipe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    _print_sample([trained.output.folder, "--prompt", "rank \udcff", "--num-tokens", "5", "--temperature", "0"])
    out, err = capfd.readouterr()
    assert out.startswith("rank \N{REPLACEMENT CHARACTER}")
    assert err == ""


def _save_without_a_recipe(folder: Path) -> None:
    save(folder, TrainState(trained=small_model.build(ParallelConfig())))


def test_what_cannot_be_sampled_is_refused_in_one_line(
    trained: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, _save_without_a_recipe, tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    folder = trained.output.folder
    for words, message in (
        ([str(tmp_path / "none")], "there is no checkpoint"),
        ([str(tmp_path / "empty")], "holds no complete checkpoint"),
        ([str(tmp_path / "bare")], "holds no recipe: a script saved it"),
        ([folder, "--nproc", "2", "--parallel.tp", "3"], "2 ranks are not a multiple of"),
        ([folder, "--nproc", "4", "--parallel.tp", "4"], "tp=4 must divide"),
        ([folder, "--nproc", "0"], "nproc=0 must be at least 1"),
    ):
        with pytest.raises(SystemExit) as end:
            recipes.generate.main(words)
        err = capsys.readouterr().err
        assert end.value.code == 1
        assert message in err
        assert err.startswith("error: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"), [("temperature", "-1"), ("num-tokens", "0"), ("seed", "-1"), ("top-p", "0"), ("top-p", "1.5")]
)
def test_options_out_of_range_are_refused(
    option: str, value: str, trained: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        recipes.generate.main([trained.output.folder, f"--{option}", value])
    assert end.value.code
    err = capsys.readouterr().err
    assert option.replace("-", "_") in err
    assert "Traceback" not in err


def test_a_recipe_of_a_checkpoint_takes_the_layout_of_the_command(trained: Recipe) -> None:
    assert _sample(dataclasses.replace(trained, parallel=TP), world_size=1) == _sample(trained, world_size=1)


def _draws_where_rank_0_sees(values: list[list[float]]) -> list[str]:
    """What comes of logits of which one rank alone may see some that are not finite."""
    outcomes = []
    for broken in values:
        logits = torch.tensor(broken if dist.get_rank() == 0 else [0.0, 1.0, 0.5])
        try:
            outcomes.append(str(draw(logits, 0.8, 1.0, torch.Generator())))
        except ValueError as error:
            outcomes.append(str(error))
    return outcomes


def test_logits_that_are_not_finite_are_one_error_on_every_rank() -> None:
    inf = torch.inf
    seen = [[0.0, torch.nan, 1.0], [0.0, inf, 1.0], [torch.nan, inf, 1.0], [-inf, -inf, -inf], [-inf, 1.0, -inf]]
    for outcomes in run_ranks(2, _draws_where_rank_0_sees, seen):
        assert all("logits are NaN or infinite" in each for each in outcomes[:4])
        # Tokens that cannot come are none of them.
        assert outcomes[4] == "1"


def test_text_comes_character_by_character_and_adds_up_to_the_whole() -> None:
    said = "na\xefve \N{SNOWMAN}\N{GRINNING FACE}!"
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, tokenizer.encode("so "))
    pieces = [stream.add(token) for token in tokenizer.encode(said)]
    assert [each for each in pieces if each] == list(said)
    assert stream.rest() == ""
    # What never becomes a character shows as broken, once that is certain.
    broken = TextStream(tokenizer)
    assert [broken.add(token) for token in b"a\xe2\x98b\xe2"] == ["a", "", "", "\ufffdb", ""]
    assert broken.rest() == "\ufffd"


def test_text_of_a_tokenizer_file_adds_up_across_token_borders(tmp_path: Path) -> None:
    said = "r\xf4les \N{SNOWMAN} of  ranks \N{GRINNING FACE}"
    tokenizer = load_tokenizer(TokenizerConfig(file=train_tokenizer(tmp_path / "tokenizer.json")))
    tokens = tokenizer.encode(said)
    for start in range(len(tokens)):
        stream = TextStream(tokenizer, tokens[:start])
        text = "".join([stream.add(token) for token in tokens[start:]]) + stream.rest()
        before = tokenizer.decode(tokens[:start])
        assert before + text == said or before.endswith("\ufffd")


def _printed(recipe: Recipe, options: dict[str, object], drawn: list[int]) -> tuple[list[str], list[list[int]]]:
    """What rank 0 prints, call by call, where given tokens are drawn; and the prompts that the model was given."""
    command = GenerateCommand(checkpoint=str(recipe.output.checkpoints), **options)  # type: ignore[arg-type]
    prompts: list[list[int]] = []
    left = list(drawn)

    def draw_next(*_: object) -> int:
        return left.pop(0)

    def logits(_trained: object, tokens: list[int], _position: int) -> Tensor:
        prompts.append(tokens)
        return torch.zeros(ByteTokenizer.vocab_size)

    with (
        mock.patch("recipes.generate.draw", draw_next),
        mock.patch("recipes.sampling._last_logits", logits),
        mock.patch("builtins.print") as written,
    ):
        print_sample(command, recipe)
    return [call.args[0] if call.args else "\n" for call in written.call_args_list], prompts


def test_text_is_printed_as_it_comes(trained: Recipe) -> None:
    ((pieces, _),) = run_ranks(1, _printed, trained, {"prompt": "mesh ", "num_tokens": 4}, [*"a\xe9b".encode()])
    assert pieces == ["mesh a", "", "\xe9", "b", "", "\n"]


def test_a_chat_is_asked_in_the_template_of_the_data_and_ends_with_the_answer(trained: Recipe) -> None:
    options = {"prompt": "hi", "chat": True}
    chats = dataclasses.replace(trained, data=DataConfig(record="chat", source="chats.jsonl", sequence_length=16))
    drawn = [*b"yo", ByteTokenizer.eos, *b"never"]
    ((pieces, prompts),) = run_ranks(1, _printed, chats, options, drawn)
    assert "".join(pieces) == "yo\n"
    asked = [ByteTokenizer.bos, *b"<|user|>\nhi\n<|assistant|>\n"]
    assert prompts[0] == asked[-len(prompts[0]) :]


def test_a_chat_ends_with_the_end_token_of_its_template(tmp_path: Path) -> None:
    file = train_tokenizer(tmp_path / "tokenizer.json", specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    data = DataConfig(tokenizer=TokenizerConfig(file=file))
    command = GenerateCommand(checkpoint="x", prompt="hi", chat=True, chat_template="chatml")
    tokenizer = load_tokenizer(data.tokenizer)
    tokens, ends = recipes.generate._prompt(command, data, tokenizer)
    assert ends == {tokenizer.eos, tokenizer.special("<|im_end|>")}
    assert tokens[-2:] == tokenizer.encode("assistant\n")[-2:]


def test_a_chat_needs_a_template(trained: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--chat"], "was trained on no chats that its recipe names; name the one to use with --chat-template"),
        (["--chat-template", "plain"], "chat_template='plain' is for chats; give --chat too"),
    ):
        with pytest.raises(SystemExit) as end:
            recipes.generate.main([trained.output.folder, *words])
        assert end.value.code
        assert message in " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
