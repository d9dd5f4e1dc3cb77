"""Build a tiny random Qwen2 chat model with a byte-level BPE tokenizer, offline: python -m cpu_rollout.tiny_model DIR

The weights are random, but next-token probabilities are peaked as in text: a Zipf law over the vocabulary (in an
order drawn at random) times a context-dependent part. A uniform model would spread its responses so thin that
nobody could learn a rule over tokens from two thousand of them.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from cpu_rollout.sampling import sample_responses
from cpu_rollout.token_rule import SAMPLES_FILE

END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NOUNS = ("river", "engine", "garden", "teacher", "window", "market", "letter", "mountain", "signal", "kitchen")
VERBS = ("follows", "repairs", "paints", "remembers", "measures", "opens", "describes", "carries")

#: Exponent of the Zipf law, and the standard deviation of the context-dependent part of a logit.
ZIPF_EXPONENT = 1.0
CONTEXT_SPREAD = 0.3
#: So many tokens are in use at all; a real model's top-p leaves about as few at each step.
TOKENS_IN_USE = 32
#: The logit of a token that the model does not use.
NEVER = -30.0
#: The chance that a response ends at any token, context aside: some end early, most reach the limit.
END_PROBABILITY = 0.004


def sentences() -> list[str]:
    """A small corpus: enough for a tokenizer, and the source of the example's prompts."""
    return [f"The {a} {verb} the {b}." for a in NOUNS for verb in VERBS for b in NOUNS if a != b]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a ChatML template, trained on `sentences`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*sentences(), "system user assistant"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def zipf_logits(vocab_size: int, end_id: int, silent_ids: list[int], generator: torch.Generator) -> torch.Tensor:
    """Log-probabilities, shape (vocab_size,), of a Zipf law over tokens in random order; `silent_ids` get none."""
    ranks = torch.randperm(vocab_size, generator=generator).float() + 1
    logits = -ZIPF_EXPONENT * ranks.log()
    logits[ranks > TOKENS_IN_USE] = NEVER
    logits[silent_ids] = NEVER
    logits[end_id] = -torch.inf
    logits -= logits.logsumexp(0)
    logits[end_id] = torch.tensor(END_PROBABILITY).log()
    return logits


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A random Qwen2 of 0.2 M parameters in which one hidden unit carries the Zipf law.

    Unit 0 is the same large number for every token, so after the final norm it is nearly constant, and the
    output layer's column 0 acts as the bias that Qwen2 does not have.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    silent = [int(tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", END_OF_TEXT)]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    width = config.hidden_size
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.normal_(0.0, 1.0, generator=generator)
        embedding[:, 0] = 8.0 * width**0.5
        # RMS normalisation brings unit 0 to about sqrt(width) and shrinks the others to 1/8 of it in all.
        head.normal_(0.0, 8.0 * CONTEXT_SPREAD / width**0.5, generator=generator)
        head[:, 0] = zipf_logits(len(tokenizer), tokenizer.eos_token_id, silent, generator) / width**0.5
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval()


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user turn, ready for the assistant's."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(prompt)["input_ids"])


def sample_for_calibration(model: Any, tokenizer: Any, num_prompts: int = 16) -> list[list[int]]:
    """Responses (token ids) to prompts of the corpus, drawn once so that a rule can be balanced beforehand."""
    texts = sentences()
    generator = torch.Generator().manual_seed(12345)
    responses: list[list[int]] = []
    for text in texts[:: len(texts) // num_prompts][:num_prompts]:
        drawn = sample_responses(model, prompt_ids(tokenizer, text), 32, 48, 1.0, generator)
        responses += [response.tokens for response in drawn]
    return responses


def build(out_dir: Path, seed: int = 0) -> None:
    """Write model, tokenizer and calibration samples into out_dir; all or nothing."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    staging = out_dir.with_name(out_dir.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    tokenizer.save_pretrained(staging)
    model.save_pretrained(staging)
    (staging / SAMPLES_FILE).write_text(json.dumps(sample_for_calibration(model, tokenizer)))
    shutil.rmtree(out_dir, ignore_errors=True)
    staging.rename(out_dir)


def main() -> None:
    """Build the model unless it is there."""
    out_dir = Path(sys.argv[1]).resolve()
    if (out_dir / SAMPLES_FILE).exists():
        print(f"tiny model: {out_dir} is there")
        return
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    started = time.monotonic()
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    build(out_dir)
    print(f"tiny model: built {out_dir} in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
