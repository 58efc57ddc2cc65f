"""Four processes that share sequences, by twos and all together, against one process that reads them whole."""

from functools import cache

import pytest
import sequence_ranks
import torch
import torch.distributed as dist
from sequence_ranks import DECODERS, FEW, LENGTHS, NAMES, PASSED_ON
from small_models import FIELDS, small_model
from torch.distributed.device_mesh import init_device_mesh
from training import many

from unrolled.contract import UnsupportedError
from unrolled.decode import plan
from unrolled.generation import generate
from unrolled.models import NonLocalBlock
from unrolled.ops import sequence
from unrolled.ops.replay import Replay
from unrolled.testing.sequence import Meeting, joined, run_slices

RANKS = 4
FP64, FP32 = str(torch.float64), str(torch.float32)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of the four processes found; they are started once."""
    folder = tmp_path_factory.mktemp("ranks")
    many.results(RANKS, sequence_ranks.write, folder, seconds=180)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def of_ranks(found, key):
    return [of_rank[key] for of_rank in found if key in of_rank]


@cache
def of_one(name, dtype, padded=False):
    mask = sequence_ranks.padding() if padded else None
    return joined([run_slices(sequence_ranks.mechanism(name, dtype), sequence_ranks.inputs(dtype), mask)])


def error(a, b):
    """Largest difference, relative to the largest value expected."""
    assert a.shape == b.shape
    if b.numel() == 0:
        return 0.0
    largest = b.double().abs().max()
    return float((a.double() - b.double()).abs().max() / torch.where(largest == 0, 1, largest))


def unscaled(results):
    """RWKV-4's sums without their scale exp(-top), whose rounding depends on where a sequence is cut."""
    if "state.top" not in results:
        return results
    sums = {name: results[name] * results["state.top"].exp() for name in ("state.num", "state.den")}
    return {name: x for name, x in results.items() if name != "state.top"} | sums


def assert_exact(results, expected):
    results, expected = unscaled(results), unscaled(expected)
    assert results.keys() == expected.keys()
    for name, right in expected.items():
        allowed = 1e-13 if name.startswith("gradient") else 1e-14
        assert error(results[name], right) <= allowed, name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_what_one_gives(found, name):
    """In `forward`, in two calls of `prefill`, in the state after them, and in all gradients."""
    assert_exact(joined(of_ranks(found, f"2 {name} {FP64}")), of_one(name, torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_in_single_precision(found, name):
    """1e-6, or for gradients twice the rounding of one process, where that is more."""
    results, exact = joined(of_ranks(found, f"2 {name} {FP32}")), of_one(name, torch.float64)
    for key, right in of_one(name, torch.float32).items():
        rounding = error(right, exact[key]) if key.startswith("gradient") else 0
        assert error(results[key], right) <= max(1e-6, 2 * rounding), key


@pytest.mark.parametrize("name", PASSED_ON)
def test_four_ranks_that_pass_sums_on_give_what_one_gives(found, name):
    """With padding, that of a row all over the first slice."""
    assert_exact(joined(of_ranks(found, f"4 {name} padded")), of_one(name, torch.float64, padded=True))


@pytest.mark.parametrize("name", FEW)
def test_four_ranks_that_gather_give_what_one_gives(found, name):
    assert_exact(joined(of_ranks(found, f"4 {name} {FP64}")), of_one(name, torch.float64))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_in_slices_has_the_same_loss_and_gradients(found, kind, size):
    """Two ranks pass sums on; four gather, and recompute the blocks in the backward pass."""
    model, loss, results = sequence_ranks.decoder_results(kind)
    expected = sequence_ranks.backward(model, loss, results)
    ranks = of_ranks(found, f"{size} {kind} decoder")[:size]
    results = {}
    for name in expected:
        every = [rank[name] for rank in ranks if name in rank]
        if name.endswith("half"):
            results[name] = torch.cat(every, 1)
        else:
            results[name] = every[0] if name == "position" else torch.stack(every).sum(0)
    assert_exact(results, expected)


def test_a_rank_whose_targets_are_all_ignored_takes_part():
    """Its loss is 0 and has no gradient of its own, but other ranks need that of its state."""
    model, (x, y) = sequence_ranks.decoder("hybrid"), sequence_ranks.tokens()
    y = y.clone()
    y[:, :150] = -100  # the first rank's targets, and more
    expected = gradients_of(model, model.loss(x, y))
    meeting = Meeting(2)

    def run(rank):
        with sequence.use(meeting.of(rank)):
            slices = [z.chunk(2, 1)[rank] for z in (x, y)]
            return gradients_of(model, model.loss(*slices))

    ranks = meeting.run(run)
    assert float(ranks[0]["loss"]) == 0
    assert_exact({name: sum(rank[name] for rank in ranks) for name in expected}, expected)


def gradients_of(model, loss):
    """Return a loss and its gradients; not those in `.grad`, which threads share."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return {"loss": loss.detach()} | {f"gradient of {name}": g for name, g in zip(named, found, strict=True)}


def test_bytes_sent_do_not_depend_on_the_length(found):
    """By the formulas in `unrolled.ops.sequence`, for B = 1, G = 8, R = M = 64, P = 2 and four bytes each."""
    heads, R, M, window = 8, 64, 64, 64
    for rank in found[:2]:
        sent = rank["sent"]
        assert sent["linear"] == [2 * heads * (R * M + R + 1) * 4] * len(LENGTHS) == [266_304] * 3
        assert sent["retention"] == [2 * heads * (R * M + 1) * 4]
        assert sent["delta_net"] == [2 * heads * R * (M + R) * 4]
        assert sent["window"] == [2 * heads * window * (R + M) * 4]
        assert sent["softmax"] == [2 * heads * n // 2 * (R + M) * 4 for n in (1024, 2048)]
        # Of two ranks that pass states on, the first sends forward and the second backward.
        assert sent["pipelined"] == [heads * (R * M + R) * 4]
        assert sent["pipelined window"] == [heads * window * (R + M) * 4]


def test_slices_of_different_lengths_are_refused_on_every_rank(found):
    shapes = "[2, 5], [2, 6], [2, 5], [2, 6], but must have one shape"
    assert all(shapes in rank["uneven"] for rank in found)


def test_a_mask_on_some_ranks_is_refused_on_every_rank(found):
    shapes = "[2, 5] with a mask, [2, 5], [2, 5] with a mask, [2, 5], but must have one shape"
    assert all(shapes in rank["masked on some ranks"] for rank in found)


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_is_needed():
    with (
        pytest.raises(ValueError, match="call init_process_group first"),
        sequence.sequence_parallel(),
    ):
        pass


def test_wrong_arguments_are_named(alone):
    with (
        pytest.raises(ValueError, match="scan is 'ring', but must be"),
        sequence.sequence_parallel(scan="ring"),
    ):
        pass
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "sequence"))
    with pytest.raises(ValueError, match="must have one"), sequence.sequence_parallel(mesh):
        pass
    with sequence.sequence_parallel(mesh["sequence"]) as ranks:
        assert (ranks.rank, ranks.size, ranks.scan) == (0, 1, "gather")


def test_ranks_are_those_of_the_innermost_context_and_of_this_thread():
    outer, inner = Meeting(2).of(0), Meeting(3).of(1)
    assert sequence.current() is None
    with sequence.use(outer):
        with sequence.use(inner):
            assert sequence.current() is inner
        assert sequence.current() is outer
        assert Meeting(2).run(lambda _: sequence.current() is outer) == [True, True]
    assert sequence.current() is None


def test_what_is_recomputed_later_runs_with_the_ranks_of_now():
    ranks, replay = Meeting(2).of(0), None
    with sequence.use(ranks):
        later, replay = sequence.inside(sequence.current), Replay(torch.device("cpu"))
        replay.first(sequence.current)
    assert later() is ranks
    assert replay.again(sequence.current) is ranks
    assert sequence.inside(sequence.current)() is None


def test_compiled_code_is_refused():
    """Compiled outside of the context, it is compiled again inside, and says so."""
    module = torch.compile(sequence_ranks.mechanism("linear"), backend="eager", fullgraph=True)
    x = sequence_ranks.inputs()[:, :5]
    module(x)
    with sequence.use(Meeting(2).of(0)), pytest.raises(Exception, match="run uncompiled"):
        module(x)


def read(kind):
    """Call a small model of a kind."""
    model, tokens = small_model(kind), torch.ones(2, 6, dtype=torch.long)
    if kind == "vit":
        return model(torch.rand(2, 3, 8, 8))
    if kind.startswith("ntm") or kind == "segmenter":
        return model(torch.rand(2, 6, 4))
    if kind.endswith("transcriber"):
        return model(torch.rand(2, 6, 6))
    if kind.startswith("mem"):
        return model(tokens.view(2, 3, 2))
    return model(tokens, tokens) if "_decoder" in kind or "seq2seq" in kind else model(tokens)


@pytest.mark.parametrize("kind", [kind for kind in FIELDS if kind != "decoder"])
def test_models_that_cannot_share_a_sequence_say_so(kind):
    read(kind)
    with sequence.use(Meeting(2).of(0)), pytest.raises(UnsupportedError, match="that processes share"):
        read(kind)


def test_generation_says_so():
    model, prompt = small_model("decoder").eval(), torch.ones(1, 3, dtype=torch.long)
    planned = plan(model)
    calls = [
        lambda: generate(model, prompt, 2),
        lambda: planned.generate(prompt, 2),
        lambda: planned.prefill(prompt, planned.init_state(1)),
    ]
    for call in calls:
        call()
    with sequence.use(Meeting(2).of(0)):
        for call in calls:
            with pytest.raises(UnsupportedError, match="that processes share"):
                call()


def test_a_non_local_block_and_memories_say_so():
    softmax = sequence_ranks.Maker(sequence_ranks.attention.load("softmax"))(causal=False)
    x = sequence_ranks.inputs()[:, :5]
    memory, block = softmax.read(x), NonLocalBlock(4)
    calls = [
        lambda: softmax.read(x),
        lambda: softmax.recall(x, memory),
        lambda: softmax.weights(x, x),
        lambda: softmax(x, x, x),
        lambda: block(torch.rand(1, 4, 4, 4)),
    ]
    with sequence.use(Meeting(2).of(0)):
        for call in calls:
            with pytest.raises(UnsupportedError, match="that processes share"):
                call()


def test_a_mask_of_pairs_is_refused():
    module, x = sequence_ranks.mechanism("softmax"), sequence_ranks.inputs()[:, :5]
    mask = torch.ones(5, 5, dtype=torch.bool)
    module(x, attn_mask=mask)
    with sequence.use(Meeting(2).of(0)), pytest.raises(UnsupportedError, match="attention with an attn_mask"):
        module(x, attn_mask=mask)
