from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farside.errors import AuthError
from farside.protocol.tokens import PREFIX, JoinToken, format_token, new_secret, parse_token

TOKEN = JoinToken("hub", "hub.example:7420", bytes(range(32)), "secret", "c4", False, 1_900_000_000)
text = st.text(max_size=40)
tokens = st.builds(
    JoinToken,
    text,
    text,
    st.binary(min_size=32, max_size=32),
    text,
    text,
    st.booleans(),
    st.integers(0, 2**40),
)


@given(tokens)
def test_round_trip_on_one_line(token: JoinToken) -> None:
    line = format_token(token)
    assert line.startswith(PREFIX) and len(line.split()) == 1
    assert parse_token(line) == token


def test_white_space_from_copying_does_not_matter() -> None:
    line = format_token(TOKEN)
    assert parse_token(f"  {line[:30]}\r\n {line[30:]}\n") == TOKEN


@given(st.data())
def test_a_changed_character_is_told_from_an_unknown_token(data: st.DataObject) -> None:
    line = format_token(TOKEN)
    at = data.draw(st.integers(0, len(line) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda c: c != line[at] and not c.isspace()))
    with pytest.raises(AuthError, match=r"damaged|not a join token|another version"):
        parse_token(line[:at] + other + line[at + 1 :])


@given(st.integers(1, 200))
def test_a_cut_token_is_damaged(cut: int) -> None:
    line = format_token(TOKEN)
    with pytest.raises(AuthError):
        parse_token(line[: max(0, len(line) - cut)])


@pytest.mark.parametrize("bad", ["", "  \n", "farside2.abc", "hello", "farside1.", "farside1.AAAA"])
def test_other_texts_are_refused(bad: str) -> None:
    with pytest.raises(AuthError):
        parse_token(bad)


def test_the_secret_is_not_shown_by_accident() -> None:
    assert "secret" not in repr(TOKEN)
    assert new_secret() != new_secret() and len(new_secret()) >= 43
