"""The colocated vLLM engine: one per rank, in the trainer's process, streaming, asleep while the trainer works.

    engine = Engine(folder, config, max_prompt_tokens=1024, dtype=torch.bfloat16)
    engine.sync(trainer.named_weights())      # wakes it, too: its own weights are gone while it sleeps
    engine.submit((prompt_id, index), prompt.tokens, seed)   ...   engine.poll()
    engine.sleep()                            # the GPU's memory is the trainer's

Written for vLLM 0.32, whose in-process engine is used directly (`llm.llm_engine`), since only that lets requests
join while others are running. The process group must exist before the engine is made, and every rank must make
its engine at the same time: vLLM joins the group and agrees on the size of the KV cache through it. It also sets up
the process as if alone in it: seeds of the global generators, numbers of threads. Nothing here depends on these.
"""

import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ada import UserError, one_line, option
from ada.sampler import Sample

# vLLM takes 10 s to import, so it is imported when an engine is made. These it reads at import.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core in this process: weights go over by pointer
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB; it would override --cpu_kv_cache_gib
# On a CPU it warns at every sleep that it cannot sleep, and at import of what is deprecated in its own code.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # what vLLM's CPU attention can do

Key = tuple[int, int]  # (prompt_id, index)


@dataclass
class EngineConfig:
    """Options of generation."""

    temperature: float = option(1.0, "of sampling, and of the log-probs in the update", above=0)
    max_response_tokens: int = option(32, "longer responses are cut and marked truncated", at_least=1)
    max_concurrent: int = option(
        256,
        "responses that one engine generates side by side; with several ranks keep it below a rank's share of a step",
        at_least=1,
    )
    gpu_memory_share: float = option(0.5, "of a GPU's memory, for vLLM's weights and KV cache", above=0, below=1)
    cpu_kv_cache_gib: float = option(0.25, "KV cache without a GPU; at least what one response needs is taken", above=0)


class EngineError(UserError):
    """The engine cannot run this model, or was asked for something in the wrong state."""


class Engine:
    """vLLM with the temperature and the length limit fixed, one request per response.

    top-p and top-k stay off: the trainer's log-probs are over the full vocabulary.

    Args:
        folder: a Hugging Face model folder (or hub name).
        config: its max_concurrent is vLLM's max_num_seqs; more may be submitted, they queue.
        max_prompt_tokens: longest prompt that will be submitted.
        dtype: of the weights.
        cut_at_context: if prompt and response exceed the model's context, cut responses there instead of refusing.

    Raises:
        EngineError: a model or a setting that vLLM refuses or would fail with later: head sizes on a CPU, a context
            longer than the model's, models run through transformers, expandable segments.
    """

    def __init__(
        self,
        folder: str,
        config: EngineConfig,
        *,
        max_prompt_tokens: int,
        dtype: torch.dtype = torch.float32,
        cut_at_context: bool = False,
    ):
        model = AutoConfig.from_pretrained(folder)
        max_model_len = max_prompt_tokens + config.max_response_tokens
        if cut_at_context:
            max_model_len = max(min(max_model_len, model.max_position_embeddings), max_prompt_tokens + 1)
        _check_model(folder, model, max_model_len)
        self.capacity = config.max_concurrent
        self.config = config
        self.asleep = False
        self._keys: dict[str, Key] = {}  # vLLM's request id -> ours
        self._weight_names = _weight_names(model)
        if torch.cuda.is_available():
            for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
                if "expandable_segments:True" in os.environ.get(variable, ""):
                    raise EngineError(f"{variable}: expandable_segments is not known to work with sleep mode: unset it")
            placement = dict(gpu_memory_utilization=config.gpu_memory_share, enable_sleep_mode=True)
        else:
            # Without CUDA graphs, without sleep (vLLM refuses the switch, though not the calls), and without cutting
            # a prompt's prefill in two, which loses track of a seeded request's noise.
            cache_bytes = max(int(config.cpu_kv_cache_gib * 2**30), _kv_bytes(model, max_model_len, dtype))
            placement = dict(kv_cache_memory_bytes=cache_bytes, enforce_eager=True, enable_chunked_prefill=False)
        import vllm

        if not torch.cuda.is_available():
            _skip_compilation_of_token_ranks()
        try:
            self.llm = vllm.LLM(
                model=folder,
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_model_len,
                max_num_seqs=config.max_concurrent,
                max_num_batched_tokens=max(8192, max_model_len),
                logprobs_mode="processed_logprobs",  # after the temperature, like the trainer's
                distributed_executor_backend="external_launcher",  # torchrun's process group, one engine a rank
                tensor_parallel_size=1,
                generation_config="vllm",  # the model's own top-p and top-k must not slip in
                use_tqdm_on_load=False,
                seed=0,
                **placement,
            )
        except ValueError as error:
            raise EngineError(f"vLLM refuses {folder}: {one_line(error)}") from error
        self._core = self.llm.llm_engine
        if self.llm.model_config.using_transformers_backend():
            self.close()
            raise EngineError(
                f"{folder}: vLLM runs {model.model_type} through transformers' own class, which it alters"
            )
        self.tokenizer = self.llm.get_tokenizer()
        self.stop_token_ids = _stop_token_ids(folder, self.tokenizer)

    def submit(self, key: Key, tokens: list[int], seed: int) -> None:
        """Queue one response to the prompt `tokens` [P]. A seed gives the same response whatever runs beside it.

        Raises:
            EngineError: the engine is asleep.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._refuse_asleep()
        request_id = f"{key[0]}/{key[1]}"
        params = SamplingParams(
            temperature=self.config.temperature,
            max_tokens=self.config.max_response_tokens,
            seed=seed,
            stop_token_ids=self.stop_token_ids,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,  # done once, at the end
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # vLLM would copy it in depth, half the cost of a request
        )
        self._core.add_request(request_id, tokens_input(tokens), params)
        self._keys[request_id] = key

    def poll(self) -> list[Sample]:
        """One engine step: a token more for every running response. Returns the finished ones, not yet graded.

        Raises:
            EngineError: the engine is asleep.
        """
        self._refuse_asleep()
        finished = [(output.request_id, output.outputs[0]) for output in self._core.step() if output.finished]
        if not finished:
            return []
        tokens = [list(completion.token_ids) for _, completion in finished]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [
            Sample(
                *self._keys.pop(request_id),
                ids,
                list(completion.logprobs.logprobs),
                text,
                truncated=completion.finish_reason == "length",
            )
            for (request_id, completion), ids, text in zip(finished, tokens, texts, strict=True)
        ]

    def sleep(self) -> None:
        """Give the GPU's memory back: drop unfinished requests, the KV cache and the weights (level 2)."""
        if self.asleep:
            return
        # Put to sleep with live requests, vLLM would wait for them for ever.
        self._core.abort_request(list(self._keys))
        self._keys.clear()
        while self._core.has_unfinished_requests() or self._batch_in_flight():
            self._core.step()
        self.llm.sleep(level=2)
        self.asleep = True

    def sync(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights, waking the engine if it sleeps. The only way to wake it: level 2 keeps no weights.

        The order has the lowest peak: memory for the weights first, then one full tensor after the other into it,
        then the KV cache. vLLM fuses q, k, v and gate, up itself and writes into the storage that is there.

        Args:
            named_weights: every weight under its Hugging Face name, in layer order, detached; tied heads included.

        Raises:
            EngineError: a weight is missing, or responses are being generated.
        """
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        missing = set(self._weight_names)

        def sent():
            for name, weight in named_weights:
                missing.discard(name)
                yield name, weight

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": sent()})
        if missing:  # vLLM would go on with what was in memory
            raise EngineError(f"sync without {', '.join(sorted(missing))}")
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = False
        if not self.llm.reset_prefix_cache():  # what is cached was computed with the old weights
            raise EngineError("sync while responses are being generated")

    def close(self) -> None:
        """Let go of vLLM without its destroying the process group, which is not its own."""
        self._core.engine_core._finalizer.detach()

    def _refuse_asleep(self) -> None:
        if self.asleep:
            raise EngineError("the engine is asleep: sync() first")

    def _batch_in_flight(self) -> bool:
        # With async scheduling (GPUs) one more batch may be running after the last request has ended.
        return bool(self._core.engine_core.engine_core.batch_queue)


def _check_model(folder: str, model, max_model_len: int) -> None:
    """Raise EngineError, in one line, where vLLM would fail late or at length."""
    if not torch.cuda.is_available() and _head_size(model) not in CPU_HEAD_SIZES:
        raise EngineError(
            f"{folder}: head size {_head_size(model)}: on a CPU, vLLM's attention takes only {CPU_HEAD_SIZES}"
        )
    if max_model_len > model.max_position_embeddings:
        raise EngineError(
            f"{folder} takes {model.max_position_embeddings} tokens, but max_prompt_tokens + max_response_tokens "
            f"is {max_model_len}"
        )


def _head_size(model) -> int:
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def _kv_bytes(model, n_tokens: int, dtype: torch.dtype) -> int:
    """Of keys and values of one sequence, in blocks of 128 tokens at most, and one block that vLLM keeps to itself."""
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    return 2 * model.num_hidden_layers * heads * _head_size(model) * dtype.itemsize * (n_tokens + 2 * 128)


def _stop_token_ids(folder: str, tokenizer) -> list[int]:
    """All ids that end a response: the generation config may list more than the tokenizer's one."""
    try:
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:  # a model without one
        eos = None
    ids = eos if isinstance(eos, list) else [eos]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def _weight_names(model) -> list[str]:
    """The Hugging Face names of all weights, a tied head among them."""
    with torch.device("meta"):  # no memory
        lm = AutoModelForCausalLM.from_config(model)
    return [name for name, _ in lm.named_parameters(remove_duplicate=False)]


def _skip_compilation_of_token_ranks() -> None:
    """On a CPU vLLM compiles one small function, for 22 s, at the first step; the plain form takes no time."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)
