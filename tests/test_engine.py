"""The real vLLM engine against transformers on the same weights. One engine for the whole file: it is slow to build."""

import random

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from ada.data import load_tokenizer
from ada.engine import Engine, EngineConfig, EngineError
from ada.support.checkpoint import export
from ada.support.ranks import init_ranks
from ada.trainer import Trainer, TrainerConfig

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


def make_engine(folder, **options):
    return Engine(str(folder), EngineConfig(max_response_tokens=MAX_TOKENS), max_prompt_tokens=MAX_PROMPT, **options)


@pytest.fixture(scope="module")
def ranks():
    yield init_ranks()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy_folder, ranks):
    """(model, trainer with its weights) of two with a tied head."""
    root = tmp_path_factory.mktemp("models")
    models = {name: random_model(root / name, toy_folder, seed=i) for i, name in enumerate(("a", "b"))}
    return {name: (model, Trainer(str(root / name), ranks, TrainerConfig())) for name, model in models.items()}


@pytest.fixture(scope="module")
def vllm_engine(models, toy_folder, tmp_path_factory):
    """Built from an exported checkpoint of model "a": what it loads by itself is tested first of all."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export(folder, models["a"][1], load_tokenizer(str(toy_folder / "model")))
    engine = make_engine(folder)
    yield engine
    engine.close()


@pytest.fixture
def engine(vllm_engine):
    """The one engine of this file, at temperature 1 unless a test sets another."""
    yield vllm_engine
    vllm_engine.config.temperature = 1.0


def some_prompts(n, tokenizer):
    rng = random.Random(0)
    digits = tokenizer.convert_tokens_to_ids(list("0123456789"))
    return [[rng.choice(digits) for _ in range(rng.randint(1, MAX_PROMPT))] for _ in range(n)]


def generate(engine, prompts, seeds):
    """All responses, in order of the prompts."""
    for prompt_id, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        engine.submit((prompt_id, 0), prompt, seed)
    samples = []
    while len(samples) < len(prompts):
        samples += engine.poll()
    return sorted(samples, key=lambda sample: sample.prompt_id)


def reference_logprobs(model, prompt, tokens, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def check_logprobs(engine, model, temperature):
    prompts = some_prompts(64, engine.tokenizer)
    for prompt, sample in zip(prompts, generate(engine, prompts, range(64)), strict=True):
        expected = reference_logprobs(model, prompt, sample.tokens, temperature)
        assert (torch.tensor(sample.logprobs) - expected).abs().max() < 1e-4
        assert sample.truncated == (sample.tokens[-1] not in engine.stop_token_ids)
        assert len(sample.tokens) == MAX_TOKENS or not sample.truncated
        assert sample.text == engine.tokenizer.decode(sample.tokens, skip_special_tokens=True)


def test_an_exported_checkpoint_is_the_model_that_was_trained(models, engine):
    """No sync yet: the weights are those that vLLM read from the folder."""
    check_logprobs(engine, models["a"][0], 1.0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_weights_last_synced(models, engine, temperature):
    """A stale weight, a stale prefix cache, a forgotten tied head or temperature shows as a log-prob gap."""
    engine.config.temperature = temperature
    for name in ("a", "b", "a"):
        model, trainer = models[name]
        engine.sleep()
        engine.sync(trainer.named_weights())
        check_logprobs(engine, model, temperature)


def test_greedy_tokens_equal_transformers(models, engine):
    """At temperature 0 the engine must write, token for token, what transformers writes with the synced weights."""
    engine.config.temperature = 0.0
    prompts = some_prompts(8, engine.tokenizer)
    for model, trainer in models.values():
        engine.sync(trainer.named_weights())
        for prompt, sample in zip(prompts, generate(engine, prompts, range(8)), strict=True):
            options = dict(attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=MAX_TOKENS)
            assert sample.tokens == model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def test_seeded_responses_do_not_depend_on_the_batch(engine):
    """Otherwise two ranks, or a resumed run, would draw other responses than one."""
    prompts = some_prompts(100, engine.tokenizer)
    together = generate(engine, prompts, range(100))
    for i in (0, 17, 99):
        [alone] = generate(engine, [prompts[i]], [i])
        assert (alone.tokens, alone.logprobs, alone.text) == (
            together[i].tokens,
            together[i].logprobs,
            together[i].text,
        )
    again = generate(engine, prompts, range(1, 101))
    assert sum(one.tokens == other.tokens for one, other in zip(again, together, strict=True)) < 50, "other seeds"


def test_asleep_it_refuses_to_generate(models, engine):
    """Between sleep and sync there are no weights: what it wrote would be noise."""
    engine.submit((0, 0), [9, 9], 0)
    engine.sleep()  # with a live request, which is dropped
    with pytest.raises(EngineError, match="asleep"):
        engine.submit((1, 0), [9, 9], 0)
    with pytest.raises(EngineError, match="asleep"):
        engine.poll()
    engine.sync(models["a"][1].named_weights())
    assert len(generate(engine, [[9, 9]], [0])) == 1


def test_wake_up_order(models, engine, monkeypatch):
    """Lowest peak: memory for weights, weights, memory for the KV cache; then the cache of the old weights goes."""
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
    engine.sync(models["a"][1].named_weights())
    assert calls == ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset cache"]
    engine.sync(models["a"][1].named_weights())
    assert calls[5:] == ["reload_weights", "reset cache"], "awake, it need not be woken"


def test_a_missing_weight_is_an_error(models, engine):
    """vLLM would go on with what was in memory: after a sleep on a GPU, anything."""
    model, trainer = models["a"]
    with pytest.raises(EngineError, match="model.layers.1.mlp.down_proj.weight"):
        engine.sync(item for item in trainer.named_weights() if "layers.1.mlp.down_proj" not in item[0])
    engine.sync(trainer.named_weights())
    check_logprobs(engine, model, 1.0)


def test_an_untied_head_is_synced_too(tmp_path, toy_folder, ranks):
    """A second engine in one process, for a model whose head is a weight of its own."""
    random_model(tmp_path / "a", toy_folder, seed=0, tied=False)
    model = random_model(tmp_path / "b", toy_folder, seed=1, tied=False)
    config = EngineConfig(max_response_tokens=MAX_TOKENS, cpu_kv_cache_gib=1e-6)  # too little: it takes what one needs
    untied = Engine(str(tmp_path / "a"), config, max_prompt_tokens=MAX_PROMPT)
    untied.sync(Trainer(str(tmp_path / "b"), ranks, TrainerConfig()).named_weights())
    check_logprobs(untied, model, 1.0)
    untied.close()


def test_unsupported_models_are_refused_in_one_line(tmp_path, toy_folder, ranks):
    """vLLM itself would fail at its first step, or with a page of validation errors."""
    random_model(tmp_path / "narrow", toy_folder, seed=0, head_size=24)
    with pytest.raises(EngineError, match="head size 24"):
        make_engine(tmp_path / "narrow")
    with pytest.raises(EngineError, match="max_prompt_tokens"):
        Engine(str(toy_folder / "model"), EngineConfig(), max_prompt_tokens=100_000)


def test_a_model_that_vllm_runs_through_transformers_is_refused(tmp_path, toy_folder, ranks):
    """It alters the class that the trainer would load next."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SmolLM3Config(vocab_size=266, pad_token_id=0, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    SmolLM3ForCausalLM(config).save_pretrained(tmp_path / "smollm3")
    load_tokenizer(str(toy_folder / "model")).save_pretrained(tmp_path / "smollm3")
    with pytest.raises(EngineError, match="smollm3 through transformers' own class"):
        make_engine(tmp_path / "smollm3")
