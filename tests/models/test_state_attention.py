"""Recent events that continue from states: the kernels of CUDA against the plain form, in Triton's interpreter and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_freescale.models.hstu_layer import HSTULayer
from lightning_freescale.models.norm import unit_rows
from lightning_freescale.models.personal_tokens import PersonalTokens
from lightning_freescale.models.personalization import UserStates, split_history
from tests.models.interpreter import run_interpreted
from tests.models.test_personal_tokens import CUT, LENGTHS, SEGMENTED, both_cuts, make_features, make_model, make_subset

RECENT = [5, 1, 9, 3]  # events of each user
DIM, HEADS, QK, VALUE = 12, 2, 4, 6


def make_states(users: int, segments: int, layers: int = 2, tokens: int = 6) -> UserStates:
    """Random ones. Some users have an empty history."""
    rng = torch.Generator().manual_seed(segments)
    keys = torch.randn(layers, users, tokens, HEADS, QK, generator=rng)
    values = torch.randn(layers, users, tokens, HEADS, VALUE, generator=rng)
    times = torch.randint(10**6, (users, segments), generator=rng).sort(1).values
    return UserStates(keys, values, torch.arange(users) % 3, times)


def make_recent() -> tuple[Any, ...]:
    """Rows, lengths and times of the recent events."""
    rng, total = torch.Generator().manual_seed(2), sum(RECENT)
    times = torch.randint(10**5, (total,), generator=rng).cumsum(0) + 10**6
    return torch.randn(total, DIM, generator=rng), torch.tensor(RECENT), times


def make_layers(bias: bool) -> list[HSTULayer]:
    torch.manual_seed(0)
    layers = [HSTULayer(DIM, HEADS, QK, VALUE, 12 if bias else 0, number=number) for number in (1, 2)]
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        torch.nn.init.normal_(parameter, std=0.4)
    return [layer.eval() for layer in layers]


def check_join(segments: int) -> None:
    """The kernel that joins events and tokens equals ``StateAttention`` bit for bit. So do the keys and values of the tokens."""
    from lightning_freescale.models import personalization, state_attention_triton

    (x, lengths, times), store = make_recent(), make_states(7, segments)
    for users in (None, torch.tensor([5, 0, 6, 1])):
        states = store.select(torch.arange(4) if users is None else users)
        want = personalization.recent_attention(lengths, times, states, bias=True)
        given = (states, None) if users is None else (store, users)
        rows, found = state_attention_triton.join(x, 3.0, lengths.int(), times, *given, bias=True)
        assert torch.equal(rows, want.insert(x * 3.0))
        for name in ("offsets", "timestamps", "recent"):
            assert torch.equal(getattr(found, name), getattr(want, name)), name
        columns = [HEADS * VALUE, HEADS * VALUE, HEADS * QK, HEADS * QK]
        projected = torch.randn(len(rows), sum(columns), generator=torch.Generator().manual_seed(3))
        for layer in range(2):
            _, v, q, k = (part.unflatten(1, (HEADS, -1)) for part in F.silu(projected).split(columns, 1))
            q, k, v = want.arrange(q.clone(), k.clone(), v.clone())
            got = found.take_state().silu(projected[:, columns[0] :])
            expected = torch.cat([v.flatten(1), q.flatten(1), k.flatten(1)], 1)
            tokens = torch.ones(len(rows), dtype=torch.bool).index_fill(0, want.recent, value=False)
            assert torch.allclose(got, expected, rtol=0, atol=1e-6), layer
            assert torch.equal(got[tokens][:, : columns[1]], expected[tokens][:, : columns[1]])
            # Negative control: the plain SiLU has other keys and values in the rows of the tokens.
            plain = F.silu(projected[:, columns[0] :])
            assert not torch.allclose(plain, expected, rtol=0, atol=1e-2)
            assert torch.allclose(plain[~tokens], expected[~tokens], rtol=0, atol=1e-6)


def check_layers(bias: bool) -> None:
    """Two fused layers and the outputs at the last events equal the plain layers."""
    from lightning_freescale.models import personalization, state_attention_triton
    from lightning_freescale.models.attention import cuda

    (x, lengths, times), states = make_recent(), make_states(4, 2)
    layers = make_layers(bias)
    attention = personalization.recent_attention(lengths, times, states, bias)
    rows = attention.insert(x * 2.0)
    for layer in layers:
        rows = layer.plain(rows, attention)
    want = unit_rows(rows[attention.offsets[1:] - 1])
    changed = states._replace(values=states.values + 0.3)  # negative control
    for given, same in ((states, True), (changed, False)):
        rows, joined = state_attention_triton.join(x, 2.0, lengths, times, given, None, bias)
        plan, found = cuda.CudaPlan(joined.offsets, joined.timestamps, bias), rows
        for layer in layers:
            found = layer._fused(found, plan, None, joined)
        got = found.last_unit_rows(joined.offsets[1:])
        assert torch.allclose(got, want, rtol=0, atol=1e-5) == same
        assert torch.allclose(got, unit_rows(found.total())[joined.offsets[1:] - 1], rtol=0, atol=1e-6)


SCRIPT = """
import torch
from lightning_freescale.models import state_attention_triton
from tests.models.test_state_attention import check_join, check_layers

state_attention_triton.JOINED_ELEMENTS, state_attention_triton.SILU_COLUMNS = 64, 16  # several tiles of a user
with torch.no_grad():
    check_join(segments=1)
    state_attention_triton.JOINED_CHUNKS = 2  # several tiles of a program
    check_join(segments=3)
    check_layers(bias=True)
"""


def test_interpreted_kernels_equal_the_plain_form() -> None:
    run_interpreted(SCRIPT)


@both_cuts
def test_outputs_at_the_last_events_are_those_of_all_events(cut: PersonalTokens) -> None:
    """Of full histories, of histories with tokens, and of recent events with states, which may lie in a store."""
    batch = make_features(LENGTHS)
    with torch.no_grad():
        for model in (make_model(cut=None), make_model(cut=cut)):
            embedded = model.embedding(batch.features)
            whole = model.encode(embedded, batch)
            assert torch.equal(model.encode_last(embedded, batch), whole[batch.lengths.cumsum(0) - 1])
        history, recent = split_history(batch, cut)
        states = model.compress(history)
        every = model.encode_recent(recent, states)
        assert torch.equal(model.encode_recent(recent, states, last=True), every[recent.lengths.cumsum(0) - 1])
        users = torch.tensor([3, 0])
        some = make_subset(recent, users)
        found = model.encode_recent(some, states.choose(users))
        assert torch.equal(found, model.encode_recent(some, states.select(users)))
        assert not torch.equal(found, model.encode_recent(some, states.choose(users.flip(0))))  # negative control


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [CUT, SEGMENTED], ids=["one segment", "three segments"])
@pytest.mark.parametrize("bias", ["relative", "input"])
def test_compiled_kernels_equal_the_plain_form_on_a_cpu(bias: str, cut: PersonalTokens) -> None:
    """The states of the CPU, out of a store; also as a CUDA graph, which is captured for other users."""
    model, batch = make_model(bias, cut, qk_dim=16, v_dim=16), make_features(LENGTHS)
    users = torch.tensor([3, 0, 4])
    with torch.no_grad():
        history, recent = split_history(batch, cut)
        states = model.compress(history)
        some = make_subset(recent, users)
        want, last = (model.encode_recent(some, states.select(users), last=last) for last in (False, True))
        # TorchRec's tensor keeps the ids of each key, which it found on the CPU, when it moves. This is another tensor.
        on_cuda, some = model.cuda(), make_subset(recent, users).to(torch.device("cuda"))
        store = UserStates(*(part.cuda() for part in states))
        chosen = users.cuda()
        got = on_cuda.encode_recent(some, store.choose(chosen))
        assert torch.allclose(got.cpu(), want, rtol=0, atol=1e-4)
        assert torch.equal(got, on_cuda.encode_recent(some, store.select(chosen)))
        embedded = on_cuda.embedding(some.features)

        def serve() -> torch.Tensor:
            return on_cuda.continue_from(store.choose(chosen), embedded, some, last=True)

        assert torch.allclose(serve().cpu(), last, rtol=0, atol=1e-4)
        chosen.copy_(users.flip(0))
        other = serve()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = serve()
        graph.replay()
        assert torch.equal(out, other)
        assert not torch.allclose(out.cpu(), last, rtol=0, atol=1e-4)  # negative control: the states of other users
        chosen.copy_(users)
        graph.replay()
        assert torch.allclose(out.cpu(), last, rtol=0, atol=1e-4)
