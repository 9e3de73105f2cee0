from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lazyio.engine.account import Meter
from lazyio.engine.generate import Piece, Plan, Reply
from lazyio.engine.sampling import Sampler, Sampling
from lazyio.errors import ModelError

VOCAB = 30
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Scripted:
    """A sequence whose tokens are known from the start; it writes down what is asked of it."""

    def __init__(self, reply: Sequence[int]) -> None:
        self.reply = list(reply)
        self.waited_s: list[float] = []
        self.log: list[str] = []

    def prompt_logits(self, tokens: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
        self.log.append(f"prompt {list(tokens)} in {list(cuts)}")
        self.waited_s += [0.5] * len(cuts)
        return self._next()

    def ask(self, token: int) -> None:
        self.log.append(f"ask {token}")

    def step_logits(self, token: int) -> torch.Tensor:
        self.log.append(f"step {token}")
        self.waited_s.append(0.25)
        return self._next()

    def close(self) -> None:
        self.log.append("close")

    def _next(self) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(self.reply.pop(0)), VOCAB).float()


class Spelling:
    """A letter a token."""

    def stream(self) -> Any:
        return self

    def add(self, token: int) -> str:
        return LETTERS[token]

    def end(self) -> str:
        return ""


class Held(Spelling):
    """All of the text comes at the end."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, token: int) -> str:
        self.text += LETTERS[token]
        return ""

    def end(self) -> str:
        return self.text


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def reply_of(
    text: str, max_tokens: int = 10, stop: Sequence[str] = (), stop_ids: Sequence[int] = (), spelling: Any = None
) -> tuple[Reply, Scripted]:
    sequence = Scripted(ids(text))
    plan = Plan([1, 2, 3], [2, 1], max_tokens, frozenset(stop_ids), stop)
    meter = Meter(3, [2, 1], None, on_cuda=False)
    sampler = Sampler(Sampling(), VOCAB)
    return Reply(sequence, plan, sampler, spelling or Spelling(), meter), sequence  # type: ignore[arg-type]


def finished(reply: Reply) -> tuple[str, str, str]:
    """The text as it was shown and as it is told, and why it ended."""
    shown = "".join(piece.text for piece in reply)
    done = reply.completion
    return shown, done.text, done.finish_reason


def test_rows_are_asked_for_before_a_token_is_shown_and_computed_after() -> None:
    reply, sequence = reply_of("abc", max_tokens=3)
    assert next(reply) == Piece(0, "a")
    assert sequence.log == ["prompt [1, 2, 3] in [2, 1]", "ask 0"]
    assert [next(reply), next(reply)] == [Piece(1, "b"), Piece(2, "c")]
    # The last token needs no rows: nothing follows on it.
    assert sequence.log[1:] == ["ask 0", "step 0", "ask 1", "step 1"]
    with pytest.raises(StopIteration):
        next(reply)
    assert sequence.log[-1] == "close"


def test_a_reply_ends_at_its_length() -> None:
    reply, _ = reply_of("abcdef", max_tokens=4)
    assert finished(reply) == ("abcd", "abcd", "length")
    assert reply.completion.token_ids == (0, 1, 2, 3)


def test_a_stop_id_is_a_token_without_text() -> None:
    reply, sequence = reply_of("abzcd", stop_ids=[25])
    assert finished(reply) == ("ab", "ab", "stop")
    assert reply.completion.token_ids == (0, 1, 25)
    assert "ask 25" not in sequence.log


def test_a_stop_string_is_not_shown_nor_what_begins_it() -> None:
    reply, sequence = reply_of("abcxyde", stop=["xyz", "xyd"])
    assert finished(reply) == ("abc", "abc", "stop")
    assert sequence.log[-1] == "close"


def test_what_might_have_begun_a_stop_string_is_shown_at_the_end() -> None:
    assert finished(reply_of("abxy", max_tokens=4, stop=["xyz"])[0]) == ("abxy", "abxy", "length")
    assert finished(reply_of("abxyq", stop=["xyz"], stop_ids=ids("q"))[0]) == ("abxy", "abxy", "stop")


def test_text_that_comes_only_at_the_end_is_shown_too_and_looked_at_for_stop_strings() -> None:
    assert finished(reply_of("abc", max_tokens=3, spelling=Held())[0]) == ("abc", "abc", "length")
    assert finished(reply_of("abc", max_tokens=3, stop=["b"], spelling=Held())[0]) == ("a", "a", "stop")


def test_one_token_is_a_reply() -> None:
    reply, sequence = reply_of("a", max_tokens=1)
    assert finished(reply) == ("a", "a", "length")
    assert sequence.log == ["prompt [1, 2, 3] in [2, 1]", "close"]


def test_leaving_early_closes_the_sequence() -> None:
    reply, sequence = reply_of("abcdef")
    with reply:
        next(reply)
    assert sequence.log[-1] == "close"
    assert (reply.completion.text, reply.completion.finish_reason) == ("a", "interrupted")
    reply.close()
    with pytest.raises(StopIteration):
        next(reply)


def test_an_error_closes_the_sequence_and_keeps_what_there_is() -> None:
    reply, sequence = reply_of("ab")  # the third token fails
    with pytest.raises(IndexError):
        list(reply)
    assert sequence.log[-1] == "close"
    assert (reply.completion.text, reply.completion.finish_reason) == ("ab", "interrupted")


def test_the_account_keeps_prompt_and_steps_apart() -> None:
    reply, _ = reply_of("abc", max_tokens=3)
    list(reply)
    account = reply.completion.account
    assert (account.prompt_tokens, account.cuts, account.reply_tokens) == (3, (2, 1), 3)
    assert (account.prompt_waited_s, account.steps_waited_s) == (1.0, (0.25, 0.25))
    assert len(account.steps_s) == 2


def test_without_a_tokenizer_there_are_ids() -> None:
    sequence = Scripted([5, 6])
    plan = Plan([1], [1], 2, frozenset(), [])
    reply = Reply(sequence, plan, Sampler(Sampling(), VOCAB), None, Meter(1, [1], None, on_cuda=False))  # type: ignore[arg-type]
    assert list(reply) == [Piece(5, ""), Piece(6, "")]
    assert (reply.completion.text, reply.completion.finish_reason) == ("", "length")


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.5, seed=1)], ids=["greedy", "random"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_it(sampling: Sampling, value: float) -> None:
    class Broken(Scripted):
        def step_logits(self, token: int) -> torch.Tensor:
            return super().step_logits(token).index_fill(0, torch.tensor([7]), value)

    sequence: Any = Broken([3, 4])
    meter = Meter(2, [2], None, on_cuda=False)
    with Reply(sequence, Plan([1, 2], [2], 5, (), ()), Sampler(sampling, VOCAB), None, meter) as reply:
        next(reply)
        with pytest.raises(ModelError, match="the logits after 3 tokens are no finite numbers"):
            next(reply)
    assert sequence.log[-1] == "close"
