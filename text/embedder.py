# SPDX-License-Identifier: Apache-2.0
"""`Embedder`: texts in, vectors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.modules import read_modules
from headswap.registry.errors import ConversionError, InputError
from headswap.text.answers import check_finite
from headswap.text.encode import Encoded, Encoder
from headswap.text.given import Truncation, as_list, whole_number
from headswap.text.recipe import Recipe, pooled, read_recipe
from headswap.text.runner import Progress, Runner
from headswap.text.source import open_source

if TYPE_CHECKING:
    import numpy as np


class Embedder:
    """Embeds texts with a checkpoint or a model.

    `source` is what `headswap.load` takes (with `load_options`), or a model from
    `headswap.as_embedding_model`, which needs `tokenizer` and whose own pooling counts. For a
    checkpoint, sentence-transformers' files beside it decide: modules.json (Transformer, Pooling in
    every mode, Dense, Normalize) and the prompts by name (`.prompts`). `pooling=` among the options
    takes one rule in place of all that. A text longer than the limit (`.limit`) is cut with a
    warning, or refused; `truncation` as in `headswap.text.Classifier`.
    """

    def __init__(
        self,
        source: str | PathLike[str] | Any,
        *,
        tokenizer: Any = None,
        batch_size: int = 32,
        max_length: int | None = None,
        truncation: Truncation = True,
        **load_options: Any,
    ) -> None:
        given = load_options.get("pooling") is not None
        options = {"task": "embed", **load_options} if _is_path(source) else load_options
        opened = open_source(source, tokenizer, options, "embed", None if given else _own_pooling)
        plain = opened.checkpoint is None or given
        self.recipe = Recipe() if plain else read_recipe(opened.checkpoint)  # type: ignore[arg-type]
        self.model = opened.model
        self._runner = Runner(opened, batch_size=batch_size, max_length=max_length)
        self.batch_size, self.limit = self._runner.batch_size, self._runner.limit
        self._encoder = Encoder(opened.tokenizer, self.limit, truncation=truncation)
        self._tokenizer = opened.tokenizer

    @property
    def prompts(self) -> dict[str, str]:
        """The checkpoint's prompts by name ("query", "document", ...)."""
        return dict(self.recipe.prompts)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        progress: Progress | None = None,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """fp32 vectors `[texts, width]` in the order given; `.tolist()` gives plain numbers.

        `dimensions` keeps that many of the first numbers; a vector that is normalised is so after
        that. `normalize` None does what the checkpoint says (a last Normalize module).
        `prompt_name` names one of `.prompts` to put before each text, `prompt` is one; without
        both the checkpoint's default prompt is used, if it has one.

        Raises `ConversionError` for an unknown prompt and for `dimensions` that the checkpoint does
        not offer (see `allowed_dimensions`), `InputError` for a text without tokens, or too long
        where cutting is off.
        """
        given = as_list(texts)
        wrong = tuple(i for i, text in enumerate(given) if not isinstance(text, str))
        if wrong:
            raise InputError(f"Texts must be strings; see text {wrong[0]}.", rows=wrong)
        before = self._prompt(prompt_name, prompt)
        rows = self._encode(before, given)
        skipped = self._skipped(before)

        def function(batch: dict[str, Tensor]) -> Tensor:
            return self._vectors(self.model(**batch), batch, skipped)

        by_executor = self._runner.vectors(rows, progress)
        vectors = self._runner.run(rows, function, progress) if by_executor is None else by_executor
        if not rows:
            return vectors.reshape(0, 0).numpy()
        check_finite(vectors, "The vector of text")
        vectors = self._cut(vectors, dimensions)
        if self.recipe.normalize if normalize is None else normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        return vectors.numpy()

    def cosine(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        dimensions: int | None = None,
    ) -> list[float]:
        """The cosine of a query's vector with each document's, in the order given.

        The prompts named "query" and "document" are used where the checkpoint has them. This
        compares two vectors; a `Reranker` reads the two texts together.
        """
        given = as_list(documents, "documents")
        vectors = [
            self.embed(texts, dimensions=dimensions, normalize=True,
                       prompt_name=name if name in self.recipe.prompts else None)
            for name, texts in (("query", [query]), ("document", given))
        ]  # fmt: skip
        found: list[float] = (vectors[1] @ vectors[0][0]).tolist() if given else []
        return found

    # -- parts ------------------------------------------------------------------------------------

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        if name is not None and prompt is not None:
            raise ConversionError("Give prompt= or prompt_name=, not both.")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise ConversionError(f"prompt= is a string; got a {type(prompt).__name__}.")
            return prompt
        name = self.recipe.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.recipe.prompts:
            known = ", ".join(self.recipe.prompts) or "none"
            raise ConversionError(f"No prompt is called {name!r}; the checkpoint has: {known}.")
        return self.recipe.prompts[name]

    def _encode(self, before: str, texts: Sequence[str]) -> list[Encoded]:
        joined = [before + text for text in texts]
        return self._encoder.encode([t.lower() for t in joined] if self.recipe.lower else joined)

    def _skipped(self, before: str) -> int:
        """How many tokens of a prompt are not pooled: those of the prompt alone, without an end
        mark (sentence-transformers' rule for include_prompt=false)."""
        pooling = self.recipe.pooling
        if not before or pooling is None or pooling.include_prompt:
            return 0
        (row,) = self._encode(before, [""])
        return len(row.ids) - (row.ids[-1] in self._tokenizer.all_special_ids)

    def _vectors(self, output: Any, batch: Mapping[str, Tensor], skipped: int) -> Tensor:
        pooling = self.recipe.pooling
        if pooling is None:
            own: Tensor = output.pooler_output
            return own.float()
        counted = batch["attention_mask"] != 0
        if skipped:
            places = torch.arange(counted.shape[1], device=counted.device)
            counted = counted & (places >= skipped)
        if not bool(counted.any(dim=1).all()):
            raise InputError(
                "A text has no tokens beside its prompt, which is not pooled.", rows=()
            )
        found = pooled(output.last_hidden_state, counted, pooling.modes).cpu()
        for step in self.recipe.steps:
            found = step(found)
        return found

    def _cut(self, vectors: Tensor, asked: int | None) -> Tensor:
        width = vectors.shape[-1]
        chosen = self.recipe.dimension if asked is None else asked
        if chosen is None:
            return vectors
        whole_number("dimensions", chosen, 1)
        config = self.model.config
        allowed = allowed_dimensions(
            getattr(config, "matryoshka_dimensions", None),
            getattr(config, "is_matryoshka", None),
            width,
        )
        if chosen not in allowed:
            shown = (f"1 to {width}" if isinstance(allowed, range)
                     else ", ".join(map(str, allowed)))  # fmt: skip
            raise ConversionError(
                f"dimensions={chosen}; this checkpoint offers {shown} (matryoshka_dimensions in "
                "its config).",
                dimensions=chosen,
            )
        return vectors[:, :chosen]


def allowed_dimensions(
    listed: Sequence[int] | None, flag: bool | None, width: int
) -> Sequence[int]:
    """The numbers of dimensions that vectors of `width` may be cut to.

    `listed` is matryoshka_dimensions in config.json, `flag` is_matryoshka. A list offers what it
    lists, and the whole width, whatever the flag. An empty list, or a false flag alone, says that
    the vectors can't be cut. No list says nothing: any number goes, and what it is worth is the
    caller's to know. Raises `ConversionError` for what is no list of whole numbers.
    """
    if listed is None:
        return [width] if flag is False else range(1, width + 1)
    if not isinstance(listed, list | tuple) or not all(type(each) is int for each in listed):
        raise ConversionError(
            f"matryoshka_dimensions in config.json is {listed!r}; it is a list of whole numbers."
        )
    return sorted({*(each for each in listed if 0 < each <= width), width})


def _is_path(source: Any) -> bool:
    return isinstance(source, (str, PathLike))


def _own_pooling(checkpoint: Checkpoint, options: dict[str, Any]) -> dict[str, Any]:
    """With modules.json the pooling is done here, on hidden states, in modes that no model has."""
    return {**options, "pooling": "mean"} if read_modules(checkpoint.folder) else options
