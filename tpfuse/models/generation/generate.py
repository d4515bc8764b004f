"""Generation with a KV cache: the prompt in one pass, then one token of every prompt at a time, greedy or sampled.

Decoding runs on the same path as training: a batch's rows are padded to a multiple of the row shards, so each new
token costs the same two messages a GEMM pair, with or without sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.runtime.errors import check
from ...kernels.runtime.rules import described
from ...layers.module import check_gathered
from ...ranks.messages import together
from .beams import Beams, Search, search
from .graph import GraphStep, may_capture
from .guessing import Guesser, Guessing, GuessingStep
from .listening import Listener
from .model import CausalModel
from .options import GenerationOptions, settled
from .outputs import Record, record_of, result
from .passes import pass_of
from .processors import Processor, PromptRows, needs_transformers, processors_of, transformers_class
from .request import Generation, GenerationRequest, Length, checked
from .sampling import Chooser, Sampling, Scores, callables
from .step import TokenStep
from .stopping import Stopping, until_all_ended

if TYPE_CHECKING:
    from typing_extensions import Unpack


@torch.no_grad()
def generate(
    model: CausalModel,
    input_ids: Tensor | None = None,
    generation_config: Any = None,
    *,
    inputs_embeds: Tensor | None = None,
    attention_mask: Tensor | None = None,
    logits_processor: Sequence[Processor] | Processor | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    assistant_model: Any = None,
    stopping_criteria: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
    streamer: Any = None,
    on_token: Callable[[Tensor], bool | None] | None = None,
    on_prompt: Callable[[int, int], None] | None = None,
    cuda_graph: bool = False,
    return_log_probs: bool = False,
    **options: Unpack[GenerationOptions],
) -> Any:
    """Continues every prompt, token by token.  Ties go to the lowest id, so in fp32 every split gives the same tokens.

    input_ids int64 [B, S]; prompts of unequal length are padded on either side, with ``attention_mask`` [B, S] 0 there.
    Returns [B, S + new], each prompt moved to end at column S (padding on its left, as transformers has it).  Dropout
    is off.  At most ``max_new_tokens`` come, or as many as the prompt has fewer than ``max_length``, or transformers'
    20, and those no further than to max_positions.

    ``options`` are those of transformers' GenerationConfig, by its names and with its defaults, but that ``top_k`` is
    all tokens unless it is given.  What a call leaves out comes from ``generation_config``, transformers' or a mapping,
    if that is given.  Those that the library does not read itself (``min_new_tokens``, ``no_repeat_ngram_size``,
    ``bad_words_ids``, ``typical_p`` and others) become transformers' own processors of scores, in its order, and need
    transformers.

    A token is the most likely one, after ``repetition_penalty``, which divides the logit of a token that was there
    before, or multiplies a negative one (Keskar et al. 2019, arXiv:1909.05858), and after each ``logits_processor``.
    ``do_sample`` draws from softmax(logits / ``temperature``), of the ``top_k`` most likely tokens, of the fewest whose
    probability is at least ``top_p`` together, and of those whose probability is at least ``min_p`` of the highest; in
    that order, which is transformers'.  ``num_return_sequences`` continues each prompt so many times, by samples that
    depend on the prompt, its row and ``seed``, not on that number or on other prompts: [B x num_return_sequences,
    S + new].

    ``num_beams`` above 1 searches the sequence of the highest sum of log-probabilities / length **
    ``length_penalty``, by transformers' rules, with ``early_stopping`` True, False or "never"; the
    ``num_return_sequences`` best of each prompt, at most ``num_beams``, come best first.  The cache then holds
    num_beams rows of each prompt, and with each token those of its new tokens are put in another order: a copy, which
    needs the memory of one layer's beside it for that time.  Penalty and processors get log-probabilities.

    A sequence ends at an ``eos_token_id``, where ``stop_strings`` (with the ``tokenizer`` of transformers that made the
    prompt) occur in the text so far and end in its last token, or where one of ``stopping_criteria`` says so.  It goes
    on as ``pad_token_id`` (default: the first eos; where there is neither, as the model continues it).  Generation
    stops when all have ended.

    ``logits_processor`` and ``stopping_criteria`` are transformers' objects, or any callables (input_ids [B, S + n],
    scores): scores [B, V], fp32 (fp64 of a model in fp64), give scores of that shape; a criterion gets None for them
    and gives bools [B], or one.  Where the ranks' answers differ, the first rank's processors count, and any rank's
    criterion.

    ``streamer`` has transformers' ``put(ids)``, which gets the prompts [B, S] and then each column [B], on the CPU, and
    ``end()``.  It may be given on one rank alone.  ``on_token(tokens [B])`` is called with every new column; true on
    any rank stops.  Long prompts are read in pieces, so that a layer's rows need no memory for all of them;
    ``on_prompt(columns, of)`` is called behind each, on the ranks that have it.  An error of one rank's streamer or
    callable is an error on every rank.

    ``prompt_lookup_num_tokens`` guesses so many next tokens at a time, those behind the first place where the last
    ``max_matching_ngram_size`` tokens or fewer stood before; ``assistant_model``, a GPT or a parallelized module with
    the same vocabulary, guesses ``num_assistant_tokens``, and fewer where it is less sure than
    ``assistant_confidence_threshold``.  One pass checks all guesses, so that fewer passes give the same tokens: each is
    chosen by its own logits as without guesses, greedily or by the same noise.  Beams guess nothing.

    With ``return_log_probs``, of greedy or sampled tokens, a :class:`Generation` comes back: the sequences, and the
    log-probability of each new token, fp32 (fp64 of a model in fp64).  It is the model's, log softmax(logits), before
    penalty, processors, temperature and filters; the end token has its own, and what follows the end of a sequence 0.
    It equals ``-model(sequences, labels=sequences, reduction="none").loss`` to rounding, with
    ``TensorParallel(batch_invariant=T)`` in every bit.

    With ``return_dict_in_generate`` transformers' record comes back: the sequences, with ``output_scores`` the scores
    [rows, V] of each step by which its tokens were chosen, with ``output_logits`` the model's logits, fp32 (fp64 of a
    model in fp64), and of beams their sums and the rows that they went on from.

    With ``cuda_graph``, on a GPU, the step of a token becomes a CUDA graph after the second one, unless hooks,
    processors, autocast, guesses or beams stand against it.

    ValueError for arguments that break these rules; NotImplementedError, which names it, for one that is not built;
    ImportError for one that needs transformers where that is not installed.  RuntimeError where a logit is NaN: on a
    CPU at once, on a GPU when it is next asked whether all sequences have ended, which without ``eos_token_id`` is
    never.  With a streamer, a callable, stop strings or criteria a GPU is waited for at each token, else at every
    eighth.
    """
    values = together(lambda: _settled(model, inputs_embeds, generation_config, options), (model.tp.call_group,))
    shared = values | dict(
        input_ids=input_ids, attention_mask=attention_mask, on_token=on_token, tokenizer=type(tokenizer), seed=seed
    )
    shared |= dict(stopping_criteria=stopping_criteria, logits_processor=logits_processor)
    shared |= dict(cuda_graph=cuda_graph, return_log_probs=return_log_probs, assistant_model=type(assistant_model))
    model._compare("generate", shared)
    sampling, beams, length = (_part(record, shared) for record in (Sampling, Beams, Length))
    beams.check()
    check(isinstance(cuda_graph, bool), f"generate: cuda_graph must be True or False, got {described(cuda_graph)}")
    num_beams, record = beams.num_beams, record_of(values)
    check(
        record is None or not return_log_probs, "generate: give return_dict_in_generate or return_log_probs, both came"
    )
    request = checked(model, (input_ids, attention_mask), sampling, num_beams, length=length)
    guessing = _part(Guessing, shared | dict(assistant_model=assistant_model)).checked(model, request, num_beams)
    processors = callables("logits_processor", logits_processor)
    if needs_transformers(values):
        rows = num_beams if num_beams > 1 else request.sequences
        ids, mask = (x.repeat_interleave(rows, 0) for x in (request.ids, request.mask))
        processors = processors_of(
            values, PromptRows(ids, mask, request.new, request.ends, beams=num_beams), processors
        )
        request = request._replace(sampling=Sampling(sampling.do_sample, seed=seed))
    criteria = callables("stopping_criteria", stopping_criteria)
    if "max_time" in values:
        criteria = *criteria, transformers_class("MaxTimeCriteria", "max_time")(values["max_time"])
    stopping = Stopping(criteria, values.get("stop_strings"), tokenizer)
    listener = Listener(model.tp.group, streamer, on_token, on_prompt)
    check(
        num_beams == 1 or listener.idle,
        f"generate: streamer, on_token and on_prompt hear one sequence as it comes; num_beams={num_beams} are several",
    )
    check(
        num_beams == 1 or stopping.idle or request.pad is not None,
        f"generate: with num_beams={num_beams}, stop_strings and stopping_criteria need pad_token_id or eos_token_id",
    )

    models = [m for m in (model, guessing.assistant_model) if m is not None]
    training = [module for m in models for module in m.modules() if module.training]  # of one frozen in part, some
    for m in models:
        m.eval()
    try:
        if num_beams > 1:
            return _searched(model, request, beams, (processors, record), stopping=stopping)
        listener.prompt(request.ids.repeat_interleave(request.sequences, 0))
        guess = guessing.guesser(model.tp, request, sampling)
        step = _begun(model, request, processors, on_prompt=listener.read, guess=guess)
        step.choose.record = record
        replays = cuda_graph and record is None and guess is None and may_capture(model, step, request.new)
        run = GraphStep(step) if replays else step
        return _continued(step, run, request, listeners=(stopping, listener))
    finally:
        for module in training:
            module.training = True


def _settled(
    model: CausalModel, inputs_embeds: Tensor | None, config: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments that say something, for a model that can generate."""
    model.stages.check_whole("generate")
    check(model.head is not None, "generate: the model has no language-model head; make it with lm_head=True")
    check(
        model.groups.experts.replicas == 1,
        "generate: experts over replicas are not built, which may need unequal numbers of steps; make the model without"
        " experts=",
    )
    check(
        model.tp.cp is None,
        "generate: tokens come one by one, with no sequences to divide over cp=; make the model without it",
    )
    check(inputs_embeds is None, "generate: inputs_embeds is not built; a prompt is input_ids")
    check_gathered("generate", model.embedding)
    return settled(options, *(() if config is None else (config,)))


def _begun(
    model: CausalModel,
    request: GenerationRequest,
    processors: tuple[Processor, ...],
    on_prompt: Callable[[int, int], None] = lambda *_: None,
    guess: Guesser | None = None,
) -> TokenStep:
    """Returns the step that goes on from the prompts, which have been read; its first logits are there."""
    choose = Chooser(model, request.ids, request.mask, request.sampling, processors=processors)
    forward = pass_of(model, request, 0 if guess is None else guess.most)
    logits, n = forward.read(request, on_prompt), request.sequences
    if n > 1:
        forward.repeat(n)
        choose.repeat(n)
    logits = logits.repeat_interleave(n, 0)
    if guess is not None:
        return GuessingStep(request, forward, choose, logits, guess=guess)
    forward.fix()
    return TokenStep(request, forward, choose, logits)


def _continued(
    step: TokenStep, run: Callable[[], None], request: GenerationRequest, listeners: tuple[Stopping, Listener]
) -> Any:
    """Returns the prompts, and behind them one token after the other; ``run`` makes one by itself, as ``step`` does."""
    (stopping, listener), ids = listeners, request.ids
    scores, record = step.choose.scores, step.choose.record
    interval = 1 if not (listener.idle and stopping.idle) else _tokens_between(ids.device)
    for count in range(1, request.new + 1):
        columns = ids.shape[1] + count
        if count == 1 or scores.processors or record is not None:
            step.take(step.prompt_logits if count == 1 else step.logits(), step.text[:, : columns - 1])
        else:
            run()
        asks = count % interval == 0
        if asks and (request.ends or ids.is_cpu):  # a GPU is waited for below anyway
            scores.check()
        if listener.tokens(step.token[:, 0]):
            break
        if not stopping.idle:
            step.done |= stopping(step.text[:, :columns], scores.tp)
        if asks and (request.ends or not stopping.idle) and step.done.all():
            break
    listener.end()
    text = step.text[:, :columns]
    if request.ends:
        scores.check()
        text = until_all_ended(text, request.ends, prompt=ids.shape[1]) if interval > 1 else text
    if record is not None:
        return result(record, text, text.shape[1] - ids.shape[1])
    return text if step.log_probs is None else Generation(text, step.log_probs[:, : text.shape[1] - ids.shape[1]])


def _searched(
    model: CausalModel,
    request: GenerationRequest,
    beams: Beams,
    choice: tuple[tuple[Processor, ...], Record | None],
    *,
    stopping: Stopping,
) -> Any:
    """Returns the prompts, and behind them the best sequences."""
    (processors, record), ids = choice, request.ids
    scores = Scores(model, ids, request.mask, penalty=request.sampling.repetition_penalty, processors=processors)
    interval = _tokens_between(ids.device) if stopping.idle else 1
    beam_search = Search(request, beams, scores, record=record)
    return search(request, beam_search, forward=pass_of(model, request), stopping=stopping, interval=interval)


def _part(record: Any, values: Mapping[str, Any]) -> Any:
    """Returns a record of those of its fields that ``values`` has."""
    return record(**{key: values[key] for key in record._fields if key in values})


def _tokens_between(device: torch.device) -> int:
    """Returns after how many tokens generation asks again whether all sequences have ended.

    A GPU is waited for with each question; those that come too late are cut off.
    """
    return 1 if device.type == "cpu" else 8
