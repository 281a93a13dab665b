"""The real vLLM engine against transformers on the same weights. One engine for the whole file: it is slow to build."""

import random

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ada.trainer import Trainer, init_ranks

MAX_TOKENS, MAX_PROMPT = 20, 12


def random_model(folder, toy_folder, *, seed, tied=True, head_size=32):
    """A small Qwen2 with the toy's tokenizer and random weights: peaked distributions that two seeds do not share."""
    torch.manual_seed(seed)
    config = Qwen2Config.from_pretrained(toy_folder / "model")
    config.tie_word_embeddings = tied
    config.hidden_size = config.num_attention_heads * head_size
    config.initializer_range = 0.3
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((toy_folder / "model" / name).read_bytes())
    return model.eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy_folder):
    """Folders and models: two with a tied head."""
    root = tmp_path_factory.mktemp("models")
    return {name: (root / name, random_model(root / name, toy_folder, seed=i)) for i, name in enumerate(("a", "b"))}


@pytest.fixture(scope="module")
def ranks():
    yield init_ranks()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def make_engine(ranks):
    """Engines of any temperature; vLLM's is built once and shared."""
    from ada.engine import Engine

    built = {}

    def make(folder, temperature):
        if "engine" not in built:
            built["engine"] = Engine(str(folder), max_tokens=MAX_TOKENS, max_prompt_tokens=MAX_PROMPT, temperature=1.0)
        built["engine"].temperature = temperature
        return built["engine"]

    yield make
    built["engine"].close()


def some_prompts(n, tokenizer):
    rng = random.Random(0)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    return [[rng.choice(digits) for _ in range(rng.randint(1, MAX_PROMPT))] for _ in range(n)]


def generate(engine, prompts, seeds):
    """All responses, by row."""
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        engine.submit((row, 0), prompt, seed)
    done = {}
    while len(done) < len(prompts):
        done |= {row: rest for (row, _), *rest in engine.poll()}
    return done


def reference_logprobs(model, prompt, tokens, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_weights_last_synced(models, ranks, make_engine, temperature):
    """A stale weight, a stale prefix cache, a forgotten tied head or temperature shows as a log-prob gap."""
    engine = make_engine(models["a"][0], temperature)
    for name in ("a", "b", "a"):
        folder, model = models[name]
        trainer = Trainer(str(folder), ranks, lr=0.0)
        engine.sleep()
        engine.sync(trainer.named_weights())
        prompts = some_prompts(64, engine.tokenizer)
        for row, (tokens, logprobs, _, truncated) in generate(engine, prompts, range(64)).items():
            expected = reference_logprobs(model, prompts[row], tokens, temperature)
            assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4
            assert truncated == (tokens[-1] not in engine.stop_token_ids)
            assert len(tokens) == MAX_TOKENS or not truncated


def test_greedy_tokens_equal_transformers(models, ranks, make_engine):
    """At temperature 0 the engine must write, token for token, what transformers writes with the synced weights."""
    engine = make_engine(models["a"][0], 0.0)
    for name in ("a", "b"):
        folder, model = models[name]
        engine.sleep()
        engine.sync(Trainer(str(folder), ranks, lr=0.0).named_weights())
        prompts = some_prompts(8, engine.tokenizer)
        done = generate(engine, prompts, range(8))
        for row, prompt in enumerate(prompts):
            written = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
            )[0, len(prompt) :]
            assert done[row][0] == written.tolist()


def test_seeded_responses_do_not_depend_on_the_batch(models, make_engine):
    """Otherwise two ranks, or a resumed run, would draw other responses than one."""
    engine = make_engine(models["a"][0], 1.0)
    prompts = some_prompts(100, engine.tokenizer)
    together = generate(engine, prompts, range(100))
    for row in (0, 17, 99):
        assert generate(engine, [prompts[row]], [row])[0] == together[row]
    again = generate(engine, prompts, range(1, 101))
    assert sum(again[row] == together[row] for row in range(100)) < 50, "other seeds, other responses"


def test_aborted_responses_do_not_come_back(models, make_engine):
    """Rounds begun early are given up when they are not needed; their keys are used again in the next step."""
    engine = make_engine(models["a"][0], 1.0)
    prompts = some_prompts(8, engine.tokenizer)
    all_of_them = generate(engine, prompts, range(8))
    for row, prompt in enumerate(prompts):
        engine.submit((row, 0), prompt, row)
    done = {row: rest for (row, _), *rest in engine.poll()}
    aborted = set(range(0, 8, 2)) - set(done)
    engine.abort((row, 0) for row in aborted)
    while len(done) < 8 - len(aborted):
        done |= {row: rest for (row, _), *rest in engine.poll()}
    assert aborted and done == {row: all_of_them[row] for row in set(range(8)) - aborted}
    assert generate(engine, prompts, range(8)) == all_of_them


def test_prompt_tokens_survive_and_text_is_decoded_without_special_tokens(models, make_engine):
    engine = make_engine(models["a"][0], 1.0)
    tokens, logprobs, text, _ = generate(engine, some_prompts(1, engine.tokenizer), [5])[0]
    assert len(tokens) == len(logprobs)
    assert text == engine.tokenizer.decode(tokens, skip_special_tokens=True)


def test_asleep_it_refuses_to_generate(models, ranks, make_engine):
    """Between sleep and sync there are no weights: what it wrote would be noise."""
    from ada.engine import EngineError

    engine = make_engine(models["a"][0], 1.0)
    engine.submit((0, 0), [9, 9], 0)
    engine.sleep()  # with a live request, which is dropped
    with pytest.raises(EngineError, match="asleep"):
        engine.submit((1, 0), [9, 9], 0)
    with pytest.raises(EngineError, match="asleep"):
        engine.poll()
    engine.sync(Trainer(str(models["a"][0]), ranks, lr=0.0).named_weights())
    assert list(generate(engine, [[9, 9]], [0])) == [0]


def test_wake_up_order(models, ranks, make_engine, monkeypatch):
    """Lowest peak: memory for weights, weights, memory for the KV cache; then the cache of the old weights goes."""
    engine = make_engine(models["a"][0], 1.0)
    calls = []

    def watch(name, describe):
        original = getattr(engine.llm, name)

        def watched(*args, **kwargs):
            calls.append(describe(*args, **kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(engine.llm, name, watched)

    watch("sleep", lambda level: f"sleep {level}")
    watch("wake_up", lambda tags: f"wake {tags[0]}")
    watch("collective_rpc", lambda method, **_: method)
    watch("reset_prefix_cache", lambda: "reset cache")
    engine.sleep()
    engine.sync(Trainer(str(models["a"][0]), ranks, lr=0.0).named_weights())
    assert calls == ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset cache"]
    engine.sync(Trainer(str(models["a"][0]), ranks, lr=0.0).named_weights())
    assert calls[5:] == ["reload_weights", "reset cache"], "awake, it need not be woken"


def test_exported_model_is_what_was_trained(models, ranks, make_engine, tmp_path):
    """The Hugging Face folder of a checkpoint loads in transformers and gives the trainer's log-probs."""
    from ada.checkpoint import export

    engine = make_engine(models["a"][0], 1.0)
    trainer = Trainer(str(models["b"][0]), ranks, lr=0.0)
    export(tmp_path / "hf", trainer, engine.tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    prompt = some_prompts(1, engine.tokenizer)[0]
    for name, weight in models["b"][1].named_parameters():
        assert torch.equal(weight, dict(loaded.named_parameters())[name])
    assert torch.equal(loaded(torch.tensor([prompt])).logits, models["b"][1](torch.tensor([prompt])).logits)


def test_unsupported_models_are_refused_in_one_line(tmp_path, toy_folder, ranks):
    """vLLM itself would fail at its first step, or with a page of validation errors."""
    from ada.engine import Engine, EngineError

    random_model(tmp_path / "narrow", toy_folder, seed=0, head_size=24)
    with pytest.raises(EngineError, match="head size 24"):
        Engine(str(tmp_path / "narrow"), max_tokens=8, max_prompt_tokens=8)
    with pytest.raises(EngineError, match="max_prompt_tokens"):
        Engine(str(toy_folder / "model"), max_tokens=8, max_prompt_tokens=100_000)
