# SPDX-License-Identifier: Apache-2.0
"""The form that a reranker gives a pair: which template, and who decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headswap.convert.checkpoint import Checkpoint
from headswap.convert.conversion import marks
from headswap.convert.intent import stored_intent
from headswap.registry.errors import ConversionError, UnsupportedHeadError
from headswap.text.chat import chat_family, names_pairs
from headswap.text.cross_encoder import PairFiles, pair_files
from headswap.text.encode import Encoder
from headswap.text.families import FAMILIES, RerankerFamily, family_of
from headswap.text.pairs import PairTemplate
from headswap.text.running import is_causal

PairTemplateText = str | Sequence[str]
CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Form:
    """A template (None: the tokenizer's own form of a pair) and who decided it; `prompt` stands
    before each query, `hint` names the families that a checkpoint without a template may be of."""

    template: PairTemplateText | None
    source: str
    family: RerankerFamily | None = None
    prompt: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Chooser:
    """What a checkpoint says of its form: config, label names, tokenizer and files."""

    config: Any
    labels: tuple[str, ...]
    tokenizer: Any
    checkpoint: Checkpoint | None
    files: PairFiles = field(default_factory=PairFiles)

    @classmethod
    def of(cls, model: Any, labels: tuple[str, ...], source: Any) -> Chooser:
        """For an opened source (`headswap.text.source.Source`)."""
        checkpoint = source.checkpoint
        files = PairFiles() if checkpoint is None else pair_files(checkpoint.folder)
        return cls(model.config, labels, source.tokenizer, checkpoint, files)

    def form(self, asked: PairTemplateText | None) -> Form:
        """The form that is asked for: a template, a family's name, "chat", None for no template, or
        "auto" for what the checkpoint says."""
        if asked == CHAT:
            return _of_family(self._chat())
        named = next((family for family in FAMILIES if family.name == asked), None)
        if named is not None:
            return _of_family(named)
        if asked is not None and asked != "auto":
            return Form(asked, "template=")
        found = self._said() if asked == "auto" else None
        if found is None:
            return self._bare()
        if self.files.prompt and found.family is not None and not found.family.complete:
            raise UnsupportedHeadError(
                f"The checkpoint puts its prompt {self.files.prompt!r} before each pair by "
                f"default, which the form of {found.source} has no place for; give template=.",
                prompt=self.files.prompt,
            )
        return found

    def _said(self) -> Form | None:
        stored = marks(self.config).get("template")
        if stored is not None:
            return Form(stored, "stored with the model")
        family = family_of(self._model_type, self.labels) or family_of(
            self._model_type, self._words()
        )
        chats = self.files.chat if self.files.listed else names_pairs(self.tokenizer)
        try:
            return _of_family(self._chat()) if chats else _of_family(family) if family else None
        except ConversionError:
            if family is None:
                raise
            return _of_family(family)

    def _chat(self) -> RerankerFamily:
        files = self.files
        return chat_family(self.tokenizer, structured=files.structured, options=files.options,
                           instruction=files.prompt)  # fmt: skip

    def _words(self) -> tuple[str, ...]:
        """The label tokens that the checkpoint names for a head that is stored already."""
        intent = None if self.checkpoint is None else stored_intent(self.checkpoint)
        return () if intent is None else tuple(map(str, intent.names or intent.tokens))

    def _bare(self) -> Form:
        if not is_causal(self.config):
            return Form(None, "the tokenizer's pair scheme", prompt=self.files.prompt)
        may = [family.name for family in FAMILIES if family.model_type == self._model_type]
        hint = "".join(f" If it is a {name}, say template={name!r}." for name in may)
        return Form(None, "none", prompt=self.files.prompt, hint=hint)

    @property
    def _model_type(self) -> str:
        return str(self.config.get_text_config().model_type)


def _of_family(family: RerankerFamily) -> Form:
    return Form(family.pieces, family.name, family)


class PairEncoder:
    """Encoders for calls with and without an instruction, in one form."""

    def __init__(
        self, form: Form, tokenizer: Any, causal: bool,
        make: Callable[[PairTemplate | None, str], Encoder],
    ) -> None:  # fmt: skip
        self.form, self._tokenizer, self._causal, self._make = form, tokenizer, causal, make
        self._plain = self._encoder(form.template)
        self._instructed = self._with_instruction()

    def encoder(self, instruction: str | None) -> Encoder:
        """The encoder for a call; `ConversionError` for an instruction without a place, and for a
        place without an instruction."""
        if instruction and self._instructed is None:
            raise ConversionError(
                f"An instruction was given, but the form of a pair ({self.form.source}) has no "
                "place for it; give a template with {instruction}, or instruction='' for a call "
                "without the reranker's own."
            )
        if not instruction and self._instructed is self._plain and not self.default:
            raise ConversionError("The template has {instruction}, and no instruction was given.")
        return self._instructed if instruction and self._instructed else self._plain

    @property
    def default(self) -> str:
        """The instruction of calls that give none."""
        return self.form.family.instruction if self.form.family else ""

    def strings(self, instruction: str | None) -> tuple[str, ...] | None:
        """The pieces of the template in force; None for the tokenizer's own form of a pair."""
        # Read before a call gives the instruction, it is shown with its open slot.
        found = (self._instructed if instruction and self._instructed else self._plain).template
        return found.strings if isinstance(found, PairTemplate) else None

    def texts(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """`pairs` as the form takes them: behind its prompt, without blanks that it drops."""
        if self.form.family is not None and self.form.family.strips:
            return [(query.strip(), document.strip()) for query, document in pairs]
        return [(self.form.prompt + query, document) for query, document in pairs]

    def _encoder(self, template: PairTemplateText | None) -> Encoder:
        marks = not (self.form.family and self.form.family.complete)
        made = None
        if template is not None:
            made = PairTemplate.compile(template, self._tokenizer, marks=marks, causal=self._causal)
        return self._make(made, self.form.hint)

    def _with_instruction(self) -> Encoder | None:
        """The encoder for calls with an instruction; None where there is no place for one."""
        family = self.form.family
        if family is not None and family.instructed not in (None, family.pieces):
            return self._encoder(family.instructed)
        template = self._plain.template
        takes = isinstance(template, PairTemplate) and template.takes_instruction
        return self._plain if takes else None
