"""Addresses for Hugging Face: ``generate``, ``generate_batch`` (continuous batching) and plain calls of a model.

``generate_batch`` knows its requests by id; their rows are read from its batch processor. In ``generate`` and in a
plain call each row of the batch is a request, numbered through the capture; padding has no address. Beam search is
refused: it moves the rows of a request from beam to beam.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor

from torchtap.errors import PlanError
from torchtap.serving.addresses import PassTable, Request
from torchtap.serving.recorder import FollowedEngine, RowVisitor

__all__ = ["TransformersEngine"]


@final
class _Generation:
    """One call of ``generate``, or one plain call: a request for each row of the batch."""

    def __init__(self, width: int | None, samples: int) -> None:
        self.width = width  # columns of the prompt; None: all
        self.samples = samples
        self.rows: list[Request] = []


@final
class TransformersEngine(FollowedEngine):
    """Follow a model of Hugging Face."""

    def __init__(self, model: Any, visitor: RowVisitor) -> None:
        super().__init__(model, visitor)
        self._generation: _Generation | None = None
        self._batch: Any = None  # the tensors and requests of continuous batching
        self._states: dict[str, Any] = {}
        self._count = 0
        self._model: Any = model
        self._names = list(inspect.signature(type(model).forward).parameters)[1:]
        self.wrap(model, "generate", self._generate)
        with suppress(ImportError):  # a transformers without continuous batching
            from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

            self.wrap(ContinuousBatchProcessor, "_generation_step", self._step)

    def read_outputs(self) -> None:
        for name, state in self._states.items():
            made, request = state.to_generation_output(), self.requests[name]
            request.output = list(made.generated_tokens)
            request.logprobs = list(made.logprobs) or None
            request.finished = made.is_finished()

    def table(self, args: Any, kwargs: dict[str, Any]) -> PassTable | None:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        tokens = given.get("input_ids")
        if not isinstance(tokens, Tensor):
            self._visitor.report("the model was called without input_ids, so its rows have no tokens")
            return None
        return self._batched(given, tokens) if self._batch is None else self._continuous(given, tokens)

    def _step(self, step: Callable[..., Any], processor: Any, model: Any) -> Any:
        if model is self._model:
            self._batch = processor.inputs_and_outputs
        try:
            return step(processor, model)
        finally:
            self._batch = None

    # -- generate -----------------------------------------------------------------------------------------------

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or self._model.generation_config
        beams = kwargs.get("num_beams", config.num_beams) or 1
        if beams > 1:
            raise PlanError(
                f"generate(num_beams={beams}) moves requests from row to row, so rows have no address: record it with "
                "num_beams=1, or without capture"
            )
        candidates = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs"))
        given = next((each for each in candidates if each is not None), None)
        if given is None:
            raise PlanError("generate() without input_ids has no tokens to address rows by: give input_ids")
        width = given.shape[1]
        samples = kwargs.get("num_return_sequences", config.num_return_sequences) or 1
        outer, self._generation = self._generation, _Generation(width, samples)
        generation = self._generation
        try:
            made = generate(*args, **kwargs)
        finally:
            self._generation = outer
        eos = kwargs.get("eos_token_id", config.eos_token_id)
        ends = set() if eos is None else {int(each) for each in torch.as_tensor(eos).flatten()}
        sequences = made if isinstance(made, Tensor) else made.sequences
        for request, tokens in zip(generation.rows, sequences.tolist(), strict=False):
            output = tokens[width:]
            stop = next((at for at, token in enumerate(output) if token in ends), len(output) - 1)
            request.output, request.finished = output[: stop + 1], True
        return made

    def _batched(self, given: dict[str, Any], tokens: Tensor) -> PassTable:
        generation = self._generation or _Generation(None, 1)
        if not generation.rows:
            generation.rows = [self._request(row, generation) for row in range(len(tokens))]
            self._count += len(tokens) // generation.samples
        cache = given.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        rows, width = tokens.shape
        mask = given.get("attention_mask")
        if mask is None or mask.dim() != 2 or mask.shape[1] < past + width:
            mask = torch.ones(rows, past + width)
        mask = mask[:, : past + width].cpu().long()
        at = (mask.cumsum(1) - 1)[:, past:]
        real = mask[:, past:].bool()
        for row, request in enumerate(generation.rows):
            inside = real[row] & (torch.arange(past, past + width) < (generation.width or past + width))
            fresh = tokens[row].cpu()[inside].tolist()
            if fresh and int(at[row][inside][0]) == len(request.prompt):
                request.prompt += fresh
        return PassTable(
            (rows, width),
            tuple(each.id for each in generation.rows),
            tuple(real.sum(1).tolist()),
            at[real],
            tokens.cpu()[real].long(),
            real.flatten().nonzero().flatten(),
        )

    def _request(self, row: int, generation: _Generation) -> Request:
        number, sample = divmod(row, generation.samples)
        name = str(self._count + number)
        several = generation.samples > 1
        request = Request(
            f"{name}_{sample}" if several else name,
            [],
            finished=self._generation is None,
            parent=name if several else None,
            sample=sample if several else None,
        )
        self.requests[request.id] = request
        return request

    # -- continuous batching ------------------------------------------------------------------------------------

    def _continuous(self, given: dict[str, Any], tokens: Tensor) -> PassTable:
        batch = self._batch
        if hasattr(batch, "io_pairs"):
            batch = batch.io_pairs[batch.current_pair].host_io
        names, counts = [], []
        for each in batch.requests_in_batch:
            state = each.state
            names.append(state.request_id)
            counts.append(each.query_length)
            self._states[state.request_id] = state
            if state.request_id not in self.requests:
                first, _, child = state.request_id.partition("__child#")
                size = state._true_initial_tokens or len(state.initial_tokens)
                self.requests[state.request_id] = Request(
                    state.request_id,
                    list(state.initial_tokens[:size]),
                    parent=first if child else None,
                    sample=int(child) if child else None,
                )
        total = sum(counts)
        return PassTable(
            tuple(tokens.shape),
            tuple(names),
            tuple(counts),
            given["position_ids"].flatten()[:total].to("cpu", torch.long, copy=True),
            tokens.flatten()[:total].to("cpu", torch.long, copy=True),
        )
