"""The colocated vLLM engine: one per rank, in the trainer's process, streaming, asleep while the trainer works.

    engine = Engine(folder, max_tokens=2048, max_prompt_tokens=1024, temperature=1.0)
    engine.sync(trainer.named_weights())      # wakes it, too: its own weights are gone while it sleeps
    engine.submit((row, index), prompt.tokens, seed)   ...   engine.poll()
    engine.sleep()                            # the GPU's memory is the trainer's

Written for vLLM 0.32, whose in-process engine is used directly (`llm.llm_engine`), since only that lets requests
join while others are running. The process group must exist before the engine is made, and every rank must make
its engine at the same time: vLLM joins the group and agrees on the size of the KV cache through it.
"""

import logging
import os
import random
import warnings
from collections.abc import Iterable
from contextlib import contextmanager

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's core in this process: weights go over by pointer
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB; it would override CPU_KV_CACHE_BYTES
# On a CPU it warns at every sleep that it cannot sleep, and at import of what is deprecated in its own code.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")

import vllm  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402

from ada import UserError, one_line  # noqa: E402

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # what vLLM's CPU attention can do
CPU_KV_CACHE_BYTES = 256 << 20

Key = tuple[int, int]  # (row, index)


class EngineError(UserError):
    """The engine cannot run this model, or was asked for something in the wrong state."""


def check_model(folder: str, max_model_len: int) -> None:
    """Raise EngineError, in one line, where vLLM would fail late or at length."""
    config = AutoConfig.from_pretrained(folder)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not torch.cuda.is_available() and head_size not in CPU_HEAD_SIZES:
        raise EngineError(f"{folder}: head size {head_size}: on a CPU, vLLM's attention takes only {CPU_HEAD_SIZES}")
    if max_model_len > config.max_position_embeddings:
        raise EngineError(
            f"{folder} takes {config.max_position_embeddings} tokens, but max_prompt_tokens + max_response_tokens "
            f"is {max_model_len}"
        )


class Engine:
    """vLLM with the temperature and the length limit fixed, one request per response.

    Args:
        folder: a Hugging Face model folder (or hub name).
        max_tokens: most new tokens of a response; longer ones are cut and marked truncated.
        max_prompt_tokens: longest prompt that will be submitted.
        temperature: of sampling. top-p and top-k stay off: the trainer's log-probs are over the full vocabulary.
        capacity: responses generated side by side (vLLM's max_num_seqs); more may be submitted, they queue.
        memory_share: share of the GPU's *total* memory for weights and KV cache. No meaning on a CPU.
        dtype: of the weights, "float32" or "bfloat16".
        cut_at_context: if prompt and response exceed the model's context, cut responses there instead of refusing.

    Raises:
        EngineError: the model's head size is not supported on a CPU, or the context is longer than the model's.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_tokens: int,
        max_prompt_tokens: int,
        temperature: float = 1.0,
        capacity: int = 256,
        memory_share: float = 0.5,
        dtype: str = "float32",
        cut_at_context: bool = False,
    ):
        max_model_len = max_prompt_tokens + max_tokens
        if cut_at_context:
            context = AutoConfig.from_pretrained(folder).max_position_embeddings
            max_model_len = max(min(max_model_len, context), max_prompt_tokens + 1)
        check_model(folder, max_model_len)
        self.capacity = capacity
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.asleep = False
        self._keys: dict[str, Key] = {}  # vLLM's request id -> ours
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
                if "expandable_segments:True" in os.environ.get(variable, ""):
                    raise EngineError(f"{variable}: expandable_segments is not known to work with sleep mode: unset it")
            placement = dict(gpu_memory_utilization=memory_share, enable_sleep_mode=True)
        else:
            # Without CUDA graphs, without sleep (vLLM refuses the switch, though not the calls), and without cutting
            # a prompt's prefill in two, which loses track of a seeded request's noise.
            placement = dict(kv_cache_memory_bytes=CPU_KV_CACHE_BYTES, enforce_eager=True, enable_chunked_prefill=False)
            _skip_compilation_of_token_ranks()
        with _process_state_kept():
            try:
                self.llm = vllm.LLM(
                    model=folder,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    max_num_seqs=capacity,
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
        self.tokenizer = self.llm.get_tokenizer()
        self.stop_token_ids = _stop_token_ids(folder, self.tokenizer)
        self._weight_names = _weight_names(folder)

    def submit(self, key: Key, tokens: list[int], seed: int) -> None:
        """Queue one response to the prompt `tokens` [P]. A seed gives the same response whatever runs beside it.

        Raises:
            EngineError: the engine is asleep.
        """
        if self.asleep:
            raise EngineError("the engine is asleep: sync() first")
        request_id = f"{key[0]}/{key[1]}"
        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
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

    def poll(self) -> list[tuple[Key, list[int], list[float], str, bool]]:
        """One engine step: a token more for every running response.

        Returns the finished ones as (key, tokens [T], logprobs [T], text, truncated); the stop token is in tokens.
        """
        if self.asleep:
            raise EngineError("the engine is asleep: sync() first")
        finished = [output for output in self._core.step() if output.finished]
        if not finished:
            return []
        completions = [output.outputs[0] for output in finished]
        texts = self.tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
        return [
            (
                self._keys.pop(output.request_id),
                list(completion.token_ids),
                list(completion.logprobs.logprobs),
                text,
                completion.finish_reason == "length",
            )
            for output, completion, text in zip(finished, completions, texts, strict=True)
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

    def _batch_in_flight(self) -> bool:
        # With async scheduling (GPUs) one more batch may be running after the last request has ended.
        return bool(self._core.engine_core.engine_core.batch_queue)


def _stop_token_ids(folder: str, tokenizer) -> list[int]:
    """All ids that end a response: the generation config may list more than the tokenizer's one."""
    try:
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:  # a model without one
        eos = None
    ids = eos if isinstance(eos, list) else [eos]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


def _weight_names(folder: str) -> list[str]:
    """The Hugging Face names of all weights, a tied head among them."""
    with torch.device("meta"):  # no memory
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _skip_compilation_of_token_ranks() -> None:
    """On a CPU vLLM compiles one small function, for 22 s, at the first step; the plain form takes no time."""
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda x, values: (x >= values).sum(-1)


@contextmanager
def _process_state_kept():
    """vLLM sets a process up as if alone in it: re-seeds, changes threads, precision, variables. Put them back."""
    rng = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    variables = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "LD_PRELOAD")}
    try:
        yield
    finally:
        random.setstate(rng[0])
        np.random.set_state(rng[1])
        torch.set_rng_state(rng[2])
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
