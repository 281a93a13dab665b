"""Prompts (first piece: the template)."""

SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
INSTRUCTION = " Let's think step by step and output the final answer within \\boxed{}."


def apply_template(tokenizer, problem: str) -> tuple[str, list[int]]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem + INSTRUCTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    return text, list(ids)
